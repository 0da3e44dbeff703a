// The page of `nofuss serve`: searches, their answers and their addresses. map.js draws the map,
// feedback.js what is the same and what is not, labels.js the doubtful labels.
import { $, ask, button, className, complain, element, icon, leaf, numbers, pictureOf, sharp, way } from "./api.js";
import * as feedback from "./feedback.js";
import * as labels from "./labels.js";
import { plane, wire as wireMap } from "./map.js";

const FIRST = 24; // results of a search, before one asks for more

// All that the page shows: what is searched, for what, and what was found. `present` replaces it.
export let state = Object.freeze({ about: null, query: null, answer: null, error: "", k: FIRST });
let latest = 0; // an answer that comes after a newer question is dropped
let shown = ""; // the address of what is shown

export function present(change) {
  const before = state;
  state = Object.freeze({ ...state, ...change });
  if (state.about !== before.about) drawAbout();
  if (!state.answer || state.answer.results !== before.answer?.results) drawAnswer();
  feedback.draw();
  plane.draw();
}

// ---- drawing -------------------------------------------------------------------------------

function drawAbout() {
  const { about } = state;
  const groups = about.own_index && about.classes.length ? ` of ${numbers.format(about.classes.length)} classes` : "";
  const parts = [`${about.title}: ${numbers.format(about.items)} items${groups}`];
  const { "recall@1": recall, "map@r": precision } = about.scores;
  if (recall !== undefined) {
    const scores = `Recall@1 ${(100 * recall).toFixed(1)}%` + (precision === undefined ? "" : `, MAP@R ${(100 * precision).toFixed(1)}%`);
    parts.push(`${scores} on classes not seen in training`);
  }
  if (about.learned) parts.push(`has learned from ${numbers.format(about.learned)} marks since then`);
  $("run").textContent = about.run;
  $("about").textContent = parts.join(" · ");
  document.title = `${about.run} · nofuss search`;
  $("classes").replaceChildren(...about.classes.map((name) => new Option(name, name)));
}

function drawAnswer() {
  const { query, answer, error, about } = state;
  const results = answer?.results ?? [], isSearch = Boolean(query && answer);
  complain(error);
  $("results-title").textContent = error ? "No results" : isSearch ? heading() : "Start from one of these";
  $("results").replaceChildren(...results.map(cardOf));
  $("more").hidden = !isSearch || results.length < state.k || state.k >= about.most;
  $("status").textContent = isSearch ? `${results.length} of ${numbers.format(about.items)} items` :
    answer && !results.length ? "Nothing passes the filter." : "";
  drawQuery();
  drawVerdict(isSearch);
}

function drawQuery() {
  const { query, answer, about } = state, image = $("query");
  const source = !query || !answer ? "" : query.item ? `pictures/${query.item}` : query.picture;
  image.hidden = !about?.pictures || !source;
  if (image.hidden) return;
  image.src = source;
  image.alt = query.item ? `the item searched from, ${query.label ?? "no label"}` : "your picture";
}

function drawVerdict(isSearch) {
  $("verdict").hidden = !isSearch;
  if (!isSearch) return;
  const { query, answer } = state, { results, likely } = answer;
  let { match, sentence } = answer;
  if (!results.length && Object.keys(filters()).length) {
    [match, sentence] = ["nothing", `Nothing ${query.item ? "else " : ""}passes the filter.`];
  }
  $("match").hidden = !sentence;
  $("match").dataset.match = match;
  $("match").replaceChildren(...(match === "unknown" ? [] : [icon(match)]), element("span", "", sentence));
  $("likely").hidden = !likely;
  if (likely) $("likely").replaceChildren("Most likely ", className(likely.label));
  const figures = [`Searched in ${answer.searching_ms.toFixed(1)} ms`];
  if (answer.embedding_ms) figures.push(`the picture embedded in ${answer.embedding_ms.toFixed(0)} ms`);
  if (results.length) figures.unshift(`The nearest is at distance ${Math.min(...results.map((r) => r.distance)).toFixed(3)}`);
  const { far, far_limit: limit, unknown_fraction: unknown } = answer.open_set;
  if (unknown !== null && unknown !== undefined) figures.unshift(`${(100 * unknown).toFixed(0)}% of unrelated pictures look this similar`);
  if (far !== null && far !== undefined) figures.unshift(`1 − cosine to the nearest class mean is ${far.toFixed(3)}, the limit ${limit.toFixed(3)}`);
  if (likely) figures.unshift(`${likely.votes} of the first ${likely.voters} are ${leaf(likely.label)}`);
  $("figures").textContent = `${figures.join(". ")}.`;
}

function heading() {
  const { query, answer, about } = state, { classes } = answer;
  const what = query.item ? leaf(query.label ?? query.name) : "your picture";
  if (!classes) return `Neighbours of ${what}`;
  const among = classes.length === 1 ? `class ${leaf(about.classes[classes[0]])}` : `${classes.length} classes like “${$("class").value}”`;
  return `Neighbours of ${what}, only of ${among}`;
}

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
  return element("li", "", card);
}

// ---- searching -----------------------------------------------------------------------------

// query: {item, …} of the index, {like: key} or {vector} of an address, or {file}.
// how: "push" adds an address to the history, "replace" changes the current one, "keep" neither.
export async function search(query, { how = "push", k = FIRST } = {}) {
  const mine = ++latest;
  $("status").textContent = "Searching…";
  try {
    const answer = await answerTo(query, k);
    if (mine !== latest) return;
    const settled = { picture: query.picture, vector: query.vector, ...answer.query };
    present({ query: settled, answer, error: "", k });
    remember(settled, how);
    if (answer.version !== state.about.version) await refresh(); // others change it, too
  } catch (error) {
    // The query stays, so that a corrected filter asks for it again.
    if (mine === latest) present({ query, answer: null, error: error.message, k });
  }
}

export async function refresh() { // what holds for all searches
  const { about: before } = state, about = await ask("api/about");
  present({ about });
  if (before && (before.items !== about.items || before.classes.length !== about.classes.length)) plane.load();
}

export async function again() { // what is shown, by what holds now; its address stays
  await refresh();
  plane.load();
  if (state.query) await search(state.query, { how: "replace", k: state.k });
}

export async function refused(error) { // another command may have changed the run: show that first
  if (error.status === 409) await Promise.all([again(), labels.load()]).catch(() => {});
  complain(error.message);
}

function filters() { // what the fields say, as options of an address
  const all = { class: $("class").value.trim(), where: $("where").value.trim() };
  return Object.fromEntries(Object.entries(all).filter(([, words]) => words));
}

function answerTo(query, k) {
  const options = new URLSearchParams({ k, ...filters() });
  if (!query.file) {
    if (query.vector) options.set("vector", query.vector);
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
  const mine = ++latest;
  try {
    const answer = await ask(`api/some?${new URLSearchParams(filters())}`);
    if (mine !== latest) return;
    present({ query: null, answer, error: "" });
    remember(null, how);
  } catch (error) {
    if (mine === latest) present({ query: null, answer: null, error: error.message });
  }
}

// ---- addresses -----------------------------------------------------------------------------

// Every search has an address: of an item its key, of an uploaded picture its vector.
function remember(query, how) {
  if (how !== "keep") note(query, how);
  shown = location.search;
}

function note(query, how) {
  const options = new URLSearchParams(filters());
  if (query?.item) options.set("like", query.item);
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
  if (options.has("like")) return search({ item: options.get("like") }, { how, k });
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
  window.addEventListener("popstate", () => {
    if (location.search === shown) return; // a link to another place on the page
    shown = location.search;
    restore("keep");
  });
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

async function openPage() {
  const options = new URLSearchParams(location.search);
  options.delete("token"); // it is in a cookie now
  history.replaceState(history.state, "", location.pathname + (options.size ? `?${options}` : ""));
  try {
    await refresh();
  } catch (error) {
    $("about").textContent = "";
    present({ error: error.message });
    return;
  }
  const { columns, pictures, own_index: isOwn } = state.about;
  offerColumns(columns);
  $("drop").hidden = !pictures;
  sharp($("query"));
  if (pictures) wireUploads();
  wireSearch();
  wireMap();
  feedback.wire();
  plane.load();
  await restore("keep");
  if (isOwn) labels.load();
}

openPage();
