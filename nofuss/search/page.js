// The page of `nofuss serve`: searches and their results. page.map.js has the map, page.marks.js the
// marks, page.suspects.js the doubtful labels. Names of classes and files are only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const FIRST = 24; // results of a search, before one asks for more
const state = { about: null, query: null, k: FIRST, latest: 0 };
const numbers = new Intl.NumberFormat("en");

async function ask(address, options) {
  const answer = await fetch(address, options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

function tell(address, content) { // a POST of JSON
  const headers = { "Content-Type": "application/json" };
  return ask(address, { method: "POST", body: JSON.stringify(content), headers });
}

function complain(message) {
  $("error").textContent = message ? sentence(message) : "";
  $("error").hidden = !message;
}

function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (words.endsWith(".") ? "" : ".");
}

// ---- elements ------------------------------------------------------------------------------

function element(tag, kind, ...content) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...content);
  return made;
}

function button(kind, words, action) {
  const made = element("button", kind, words);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

function pictureOf(item) {
  const image = element("img");
  image.alt = "";
  image.loading = "lazy";
  sharp(image);
  image.src = `pictures/${item}`;
  return image;
}

function sharp(image) { // small pictures are enlarged: show their pixels, do not blur them
  image.addEventListener("load", () => image.classList.toggle("pixel", image.naturalWidth <= 64));
}

// The name of a class in nested folders, "Packages/Juice/Lemon": its last part, and the way to it.
const leaf = (label) => label.split("/").filter(Boolean).pop() ?? label;
const way = (label) => label.split("/").filter(Boolean).slice(0, -1).join(" / ");

function className(label, { short = false } = {}) {
  const named = element("span", "class", element("b", "label", label === null ? "no label" : leaf(label)));
  const path = label === null ? "" : way(label);
  if (path) named.append(" ", element("span", "way", short ? leaf(way(label)).trim() : path));
  return named;
}

// ---- results -------------------------------------------------------------------------------

function cardOf(result) {
  const words = element("span", "words", className(result.label, { short: true }));
  const label = result.label ?? "no label";
  let said = `${label}, search from this`;
  if (result.rank) {
    const distance = result.distance.toFixed(3);
    words.append(element("span", "figures", element("span", "rank", `#${result.rank}`), element("span", "distance", distance)));
    said = `rank ${result.rank}, ${label}, distance ${distance}, search from this`;
  }
  if (!state.about.pictures || !result.label) words.append(element("span", "name", result.name));
  for (const [column, value] of Object.entries(result.columns)) words.append(element("span", "column", `${column}: ${value}`));
  const card = button("open", "", () => search(result));
  card.dataset.item = result.item;
  if (state.about.pictures) card.append(pictureOf(result.item));
  card.append(words);
  card.setAttribute("aria-label", said);
  card.title = result.label && way(result.label) ? `${result.label}\n${result.name}` : result.name;
  const entry = element("li", "", card);
  const { threshold } = state.about;
  entry.classList.toggle("far", Boolean(result.rank) && threshold !== null && result.distance > threshold);
  return entry;
}

function show(results) {
  $("results").replaceChildren(...results.map(cardOf));
}

function clear() { // whatever the last search has left
  $("verdict").hidden = true;
  $("more").hidden = true;
  $("query").hidden = true;
  $("status").textContent = "";
  complain("");
  marks.show(null);
  state.query = null;
}

// Show that something failed, and nothing of what was there before.
function fail(error) {
  clear();
  $("results").replaceChildren();
  $("results-title").textContent = "No results";
  complain(error.message);
  plane.mark(null);
}

function verdict(answer) {
  $("verdict").hidden = false;
  let words = answer.match === "nothing" ? `${answer.sentence} The closest are shown.` : "";
  if (!answer.results.length && Object.keys(filters()).length) {
    words = `Nothing ${answer.query.key ? "else " : ""}passes the filter.`;
  }
  $("nothing").hidden = !words;
  $("nothing").textContent = words;
  const { likely } = answer;
  $("likely").hidden = !likely;
  if (likely) {
    $("likely").replaceChildren("Most likely ", className(likely.label), ` (${likely.votes} of ${likely.voters} neighbours)`);
  }
  const { threshold } = state.about, nearest = Math.min(...answer.results.map((result) => result.distance));
  const usual = threshold === null ? "" :
    `Items of one class usually lie within distance ${threshold.toFixed(3)}` +
    (answer.results.length ? `; the nearest here is at ${nearest.toFixed(3)}. Those beyond are dimmed.` : ".");
  $("threshold").textContent = [answer.match === "nothing" ? "" : answer.sentence, usual].join(" ").trim();
}

function heading(query, answer) {
  const what = query.file || query.vector ? "your picture" : leaf(answer.query.label ?? answer.query.name);
  const { classes } = answer;
  if (!classes) return `Neighbours of ${what}`;
  const among = classes.length === 1 ? `class ${leaf(state.about.classes[classes[0]])}` : `${classes.length} classes like “${$("class").value}”`;
  return `Neighbours of ${what}, only of ${among}`;
}

function present(query, answer) {
  clear();
  state.query = query;
  const image = $("query"), source = query.item === undefined ? answer.query.picture ?? query.picture : `pictures/${query.item}`;
  image.hidden = !state.about.pictures || !source;
  if (!image.hidden) {
    image.src = source;
    image.alt = query.item === undefined ? "your picture" : `the item searched from, ${query.label ?? "no label"}`;
  }
  $("results-title").textContent = heading(query, answer);
  const spent = answer.embedding_ms ? `, embedding ${answer.embedding_ms.toFixed(0)} ms` : "";
  const count = answer.results.length;
  $("status").textContent = `${count} of ${numbers.format(answer.items)} items; search ${answer.searching_ms.toFixed(1)} ms${spent}`;
  verdict(answer);
  show(answer.results);
  $("more").hidden = count < state.k || state.k >= state.about.most;
  plane.mark(answer);
  plane.filter(answer.classes);
  marks.show(answer);
}

// ---- searching -----------------------------------------------------------------------------

// query: {item, …} of the index, {like: key} or {vector} of an address, or {file}.
// how: "push" adds an address to the history, "replace" changes the current one, "keep" neither.
async function search(query, { how = "push", k = FIRST } = {}) {
  const mine = ++state.latest; // an answer that comes after a newer question is dropped
  state.k = k;
  $("status").textContent = "Searching…";
  try {
    const answer = await answerTo(query);
    if (mine !== state.latest) return;
    const { item, key, label, picture, vector } = answer.query;
    const settled = key ? { item, key, label } : { vector: vector ?? query.vector, picture: picture ?? query.picture };
    present(settled, answer);
    remember(settled, how);
  } catch (error) {
    if (mine !== state.latest) return;
    fail(error);
    state.query = query; // so that a corrected filter asks for it again
  }
}

function filters() { // what the fields say, as options of an address
  const all = { class: $("class").value.trim(), where: $("where").value.trim() };
  return Object.fromEntries(Object.entries(all).filter(([, words]) => words));
}

function answerTo(query) {
  const options = new URLSearchParams({ k: state.k, ...filters() });
  if (!query.file) {
    const like = query.key ?? query.like;
    if (query.vector) options.set("vector", query.vector);
    else if (like) options.set("like", like);
    else options.set("item", query.item);
    return ask(`api/search?${options}`);
  }
  if (query.file.size > state.about.max_upload) {
    throw new Error(`the picture is over ${Math.floor(state.about.max_upload / 2 ** 20)} MB; send a smaller one`);
  }
  const headers = { "Content-Type": "application/octet-stream" };
  return ask(`api/search?${options}`, { method: "POST", body: query.file, headers });
}

async function start(how = "push") { // some items to start from
  const mine = ++state.latest;
  try {
    const found = await ask(`api/some?${new URLSearchParams(filters())}`);
    if (mine !== state.latest) return;
    clear();
    $("results-title").textContent = "Start from one of these";
    show(found.results);
    if (!found.results.length) $("status").textContent = "Nothing passes the filter.";
    plane.mark(null);
    plane.filter(found.classes);
    remember(null, how);
  } catch (error) {
    if (mine === state.latest) fail(error);
  }
}

// ---- addresses -----------------------------------------------------------------------------

// Every search has an address: of an item its key, of an uploaded picture its vector.
function remember(query, how) {
  if (how === "keep") return;
  const options = new URLSearchParams(filters());
  if (query?.key) options.set("like", query.key);
  if (query?.vector) options.set("vector", query.vector);
  if (query && state.k !== FIRST) options.set("k", state.k);
  const words = options.toString(), address = location.pathname + (words && `?${words}`);
  const picture = query?.picture ? { picture: query.picture } : null;
  history[how === "push" ? "pushState" : "replaceState"](picture, "", address);
}

function restore(how) { // what the address says
  const options = new URLSearchParams(location.search);
  $("class").value = options.get("class") ?? "";
  $("all").hidden = !$("class").value;
  $("where").value = options.get("where") ?? "";
  const k = Number(options.get("k")) || FIRST, picture = history.state?.picture;
  if (options.has("like")) return search({ like: options.get("like") }, { how, k });
  if (options.has("vector")) return search({ vector: options.get("vector"), picture }, { how, k });
  return start(how);
}

// ---- the rest ------------------------------------------------------------------------------

function wireUploads() {
  const drop = $("drop");
  const take = (files) => { if (files.length) search({ file: files[0] }); };
  $("choose").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => { take($("file").files); $("file").value = ""; });
  for (const kind of ["dragenter", "dragover"]) {
    document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
  }
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    if (event.dataTransfer.files.length) take(event.dataTransfer.files);
    else complain("drop a picture file; links and text can't be searched with");
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
  });
}

function wireSearch() {
  const filter = () => {
    $("all").hidden = !$("class").value;
    if (state.query) search(state.query, { k: state.k });
    else start();
  };
  $("class").addEventListener("change", filter);
  $("where").addEventListener("change", filter);
  $("all").addEventListener("click", () => { $("class").value = ""; filter(); $("class").focus(); });
  $("some").addEventListener("click", () => start());
  $("more").addEventListener("click", () => {
    search(state.query, { how: "replace", k: Math.min(2 * state.k, state.about.most) });
  });
  window.addEventListener("popstate", () => restore("keep"));
}

// The filter field, where items have columns; its help is made of them.
function offerColumns(columns) {
  const names = Object.keys(columns);
  $("where-options").hidden = !names.length;
  const samples = { number: "<20", text: "=='north'", date: ">='2024-05-31'", bool: "==true" };
  const quoted = (name) => (/^[\p{L}_][\p{L}\p{N}_]*$/u.test(name) ? name : `\`${name}\``);
  $("where").placeholder = names.slice(0, 2).map((name) => quoted(name) + samples[columns[name]]).join(" and ");
  $("where-help").textContent = `Columns: ${names.map((name) => `${name} (${columns[name]})`).join(", ")}. Join with and, or, not.`;
}

function describe(about) {
  const groups = about.classes.length ? ` of ${numbers.format(about.classes.length)} classes` : "";
  const parts = [`${about.title}: ${numbers.format(about.items)} items${groups}`];
  const { "recall@1": recall, "map@r": map } = about.scores;
  if (recall !== undefined) {
    const scores = `Recall@1 ${(100 * recall).toFixed(1)}%` + (map === undefined ? "" : `, MAP@R ${(100 * map).toFixed(1)}%`);
    parts.push(`${scores} on classes not seen in training`);
  }
  if (about.taught) parts.push(`taught by ${numbers.format(about.taught)} marks since then`);
  $("run").textContent = about.run;
  $("about").textContent = parts.join(" · ");
  document.title = `${about.run} · nofuss search`;
  $("classes").replaceChildren(...about.classes.map((name) => new Option(name, name)));
}

async function openPage() {
  const options = new URLSearchParams(location.search);
  options.delete("token"); // it is in a cookie now
  history.replaceState(history.state, "", location.pathname + (options.size ? `?${options}` : ""));
  try {
    state.about = await ask("api/about");
  } catch (error) {
    $("about").textContent = "";
    fail(error);
    return;
  }
  describe(state.about);
  offerColumns(state.about.columns);
  $("drop").hidden = !state.about.pictures;
  sharp($("query"));
  sharp($("tip-picture"));
  if (state.about.pictures) wireUploads();
  wireSearch();
  wireMap();
  marks.wire();
  plane.load();
  await restore("keep");
  if (state.about.own_index) suspects.load();
}

openPage();
