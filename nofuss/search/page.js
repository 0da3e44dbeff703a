// The page of `nofuss serve`. Names of classes and files are only ever set as text.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { about: null, query: null, latest: 0 };
const pixels = new Intl.NumberFormat("en");

async function ask(address, options) {
  const answer = await fetch(address, options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

function complain(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function pictureOf(item) {
  const image = document.createElement("img");
  image.alt = "";
  image.loading = "lazy";
  sharp(image);
  image.src = `pictures/${item}`;
  return image;
}

function sharp(image) { // small pictures are enlarged: show their pixels, do not blur them
  image.addEventListener("load", () => image.classList.toggle("pixel", image.naturalWidth <= 64));
}

function text(kind, words) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = words;
  return span;
}

function show(results) {
  const cards = results.map((result) => {
    const card = document.createElement("button");
    card.type = "button";
    card.dataset.item = result.item;
    const words = document.createElement("span");
    words.className = "words";
    const label = result.label ?? "no label";
    words.append(text("label", label));
    let said = `${label}, search from this`;
    if (result.rank) {
      const figures = document.createElement("span");
      figures.className = "figures";
      figures.append(text("rank", `#${result.rank}`), text("distance", result.distance.toFixed(3)));
      words.append(figures);
      said = `rank ${result.rank}, ${label}, distance ${result.distance.toFixed(3)}, search from this`;
    }
    if (!state.about.pictures || !result.label) words.append(text("name", result.name));
    if (state.about.pictures) card.append(pictureOf(result.item));
    card.append(words);
    card.setAttribute("aria-label", said);
    card.title = result.name;
    card.addEventListener("click", () => search({ item: result.item, label: result.label }));
    const entry = document.createElement("li");
    entry.append(card);
    return entry;
  });
  $("results").replaceChildren(...cards);
}

// query: {item, label} or {file}
async function search(query) {
  const mine = ++state.latest; // an answer that comes after a newer question is dropped
  complain("");
  const only = $("class").value;
  if (only && !state.about.classes.includes(only)) {
    complain(`There is no class “${only}”.`);
    return;
  }
  const options = new URLSearchParams({ k: "24" });
  if (only) options.set("class", only);
  $("status").textContent = "Searching…";
  try {
    let answer;
    if (query.file) {
      if (query.file.size > state.about.max_upload) {
        throw new Error(`the picture is over ${Math.floor(state.about.max_upload / 2 ** 20)} MB; send a smaller one`);
      }
      const headers = { "Content-Type": "application/octet-stream" };
      answer = await ask(`api/search?${options}`, { method: "POST", body: query.file, headers });
    } else {
      options.set("item", query.item);
      answer = await ask(`api/search?${options}`);
    }
    if (mine !== state.latest) return;
    state.query = query;
    present(query, answer, only);
  } catch (error) {
    if (mine !== state.latest) return;
    $("status").textContent = "";
    complain(sentence(error.message));
  }
}

function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (words.endsWith(".") ? "" : ".");
}

function present(query, answer, only) {
  const image = $("query");
  image.hidden = !state.about.pictures;
  if (state.about.pictures) {
    image.src = answer.query.picture || `pictures/${query.item}`;
    image.alt = query.file ? "your picture" : `the item searched from, ${query.label ?? "no label"}`;
  }
  const what = query.file ? "your picture" : (query.label ?? answer.query.name);
  $("results-title").textContent = `Neighbours of ${what}` + (only ? `, of class ${only} only` : "");
  const spent = answer.embedding_ms ? `, embedding ${answer.embedding_ms.toFixed(0)} ms` : "";
  const count = answer.results.length;
  $("status").textContent = `${count} of ${pixels.format(answer.items)} items; search ${answer.searching_ms.toFixed(1)} ms${spent}`;
  $("nothing").textContent = answer.verdict;
  $("nothing").hidden = !answer.verdict;
  document.body.classList.toggle("dim", answer.nothing);
  show(answer.results);
  plane.mark(answer);
}

async function surprise() {
  const count = state.about.items;
  const wanted = new Set();
  while (wanted.size < Math.min(12, count)) wanted.add(Math.floor(Math.random() * count));
  const items = await Promise.all([...wanted].map((item) => ask(`api/items/${item}`)));
  $("results-title").textContent = "Start from one of these";
  $("nothing").hidden = true;
  $("query").hidden = true;
  document.body.classList.remove("dim");
  state.query = null;
  complain("");
  $("status").textContent = "";
  show(items);
  plane.mark(null);
}

// ---- the map -------------------------------------------------------------------------------

const plane = {
  canvas: $("map"), data: null, zoom: 1, x: 0.5, y: 0.5, marked: null, over: -1,

  size() { return [this.canvas.clientWidth, this.canvas.clientHeight]; },
  unit() { return 0.9 * this.zoom * Math.min(...this.size()); },
  wide() { const [w, h] = this.size(); return [this.unit() * Math.min(1.9, Math.max(1, w / h)), this.unit()]; },
  onScreen(x, y) {
    const [w, h] = this.size(), [sx, sy] = this.wide();
    return [w / 2 + (x - this.x) * sx, h / 2 + (y - this.y) * sy];
  },

  async load() {
    try {
      this.data = await ask("api/map");
      $("drawing").hidden = true;
      this.draw();
    } catch (error) {
      $("drawing").textContent = sentence(error.message);
    }
  },

  draw() {
    const [w, h] = this.size(), dense = window.devicePixelRatio || 1;
    if (this.canvas.width !== w * dense || this.canvas.height !== h * dense) {
      this.canvas.width = w * dense;
      this.canvas.height = h * dense;
    }
    const pen = this.canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    pen.setTransform(dense, 0, 0, dense, 0, 0);
    pen.clearRect(0, 0, w, h);
    if (!this.data) return;
    const { rows, places, stars } = this.data;
    const radius = Math.min(5, 1.4 + Math.sqrt(this.zoom));
    pen.fillStyle = colour("--soft");
    pen.globalAlpha = 0.55;
    for (let i = 0; i < rows.length; i++) {
      const [x, y] = this.onScreen(places[2 * i], places[2 * i + 1]);
      if (x < -9 || y < -9 || x > w + 9 || y > h + 9) continue;
      pen.beginPath();
      pen.arc(x, y, radius, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--ink");
    pen.strokeStyle = colour("--wash");
    for (let i = 0; i < stars.length; i += 2) star(pen, ...this.onScreen(stars[i], stars[i + 1]), 7);
    if (this.marked) {
      pen.strokeStyle = colour("--accent");
      pen.lineWidth = 2;
      for (const result of this.marked.results) {
        if (!result.place) continue;
        pen.beginPath();
        pen.arc(...this.onScreen(...result.place), 6, 0, 7);
        pen.stroke();
      }
      if (this.marked.place) cross(pen, ...this.onScreen(...this.marked.place), colour("--ink"), colour("--paper"));
      pen.lineWidth = 1;
    }
    if (this.over >= 0) {
      pen.fillStyle = colour("--accent");
      pen.beginPath();
      pen.arc(...this.onScreen(places[2 * this.over], places[2 * this.over + 1]), 6, 0, 7);
      pen.fill();
    }
  },

  mark(answer) { this.marked = answer; this.draw(); },

  nearest(px, py) {
    if (!this.data) return -1;
    let best = -1, least = 144;
    for (let i = 0; i < this.data.rows.length; i++) {
      const [x, y] = this.onScreen(this.data.places[2 * i], this.data.places[2 * i + 1]);
      const apart = (x - px) ** 2 + (y - py) ** 2;
      if (apart < least) [best, least] = [i, apart];
    }
    return best;
  },

  starAt(px, py) {
    if (!this.data) return -1;
    const { stars } = this.data;
    for (let i = 0; i < stars.length; i += 2) {
      const [x, y] = this.onScreen(stars[i], stars[i + 1]);
      if ((x - px) ** 2 + (y - py) ** 2 < 64) return i / 2;
    }
    return -1;
  },

  zoomBy(factor, px, py) {
    const [w, h] = this.size();
    px ??= w / 2; py ??= h / 2;
    const [sx, sy] = this.wide();
    const x = this.x + (px - w / 2) / sx, y = this.y + (py - h / 2) / sy;
    this.zoom = Math.min(80, Math.max(1, this.zoom * factor));
    const [tx, ty] = this.wide();
    this.x = x - (px - w / 2) / tx;
    this.y = y - (py - h / 2) / ty;
    this.draw();
  },

  moveBy(dx, dy) {
    const [sx, sy] = this.wide();
    this.x = Math.min(1, Math.max(0, this.x - dx / sx));
    this.y = Math.min(1, Math.max(0, this.y - dy / sy));
    this.draw();
  },

  whole() { [this.zoom, this.x, this.y] = [1, 0.5, 0.5]; this.draw(); },

  point(px, py) {
    const proxy = this.starAt(px, py);
    const item = proxy < 0 ? this.nearest(px, py) : -1;
    if (item !== this.over) { this.over = item; this.draw(); }
    $("tip").hidden = item < 0 && proxy < 0;
    this.canvas.style.cursor = item < 0 ? "grab" : "pointer";
    if ($("tip").hidden) return;
    const words = item < 0 ? `proxy of ${this.data.star_names[proxy]}` : this.labelOf(item);
    $("tip-words").textContent = words;
    const picture = $("tip-picture");
    picture.hidden = item < 0 || !state.about.pictures;
    if (!picture.hidden) {
      const address = `pictures/${this.data.rows[item]}`;
      if (picture.getAttribute("src") !== address) picture.src = address;
    }
    const [w, h] = this.size(), tip = $("tip");
    const left = px + 16 + tip.offsetWidth > w ? px - 16 - tip.offsetWidth : px + 16;
    const top = Math.min(Math.max(4, py - tip.offsetHeight / 2), h - tip.offsetHeight - 4);
    tip.style.transform = `translate(${Math.max(0, left)}px, ${top}px)`;
  },

  labelOf(item) {
    const code = this.data.classes[item];
    return code < 0 ? "no label" : state.about.classes[code];
  },

  leave() { this.over = -1; $("tip").hidden = true; this.draw(); },

  choose(px, py) {
    const item = this.nearest(px, py);
    if (item < 0) return;
    const code = this.data.classes[item];
    search({ item: this.data.rows[item], label: code < 0 ? null : state.about.classes[code] });
  },
};

function star(pen, x, y, radius) {
  pen.beginPath();
  for (let i = 0; i < 10; i++) {
    const r = i % 2 ? 0.42 * radius : radius, turn = Math.PI * (i / 5 - 0.5);
    pen.lineTo(x + r * Math.cos(turn), y + r * Math.sin(turn));
  }
  pen.closePath();
  pen.fill();
  pen.stroke();
}

function cross(pen, x, y, ink, paper) {
  for (const [colour, width] of [[paper, 6], [ink, 3]]) {
    pen.strokeStyle = colour;
    pen.lineWidth = width;
    pen.beginPath();
    pen.moveTo(x - 9, y - 9); pen.lineTo(x + 9, y + 9);
    pen.moveTo(x + 9, y - 9); pen.lineTo(x - 9, y + 9);
    pen.stroke();
  }
}

function wireMap() {
  const canvas = plane.canvas, held = new Map();
  let travelled = 0;
  const at = (event) => [event.offsetX, event.offsetY];
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    plane.zoomBy(Math.exp(-event.deltaY / 300), ...at(event));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    held.set(event.pointerId, at(event));
    if (held.size === 1) travelled = 0;
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = held.get(event.pointerId), now = at(event);
    if (!before) { plane.point(...now); return; }
    const [dx, dy] = [now[0] - before[0], now[1] - before[1]];
    travelled += Math.hypot(dx, dy);
    if (held.size === 2) { // two fingers: their distance zooms
      const other = [...held].find(([id]) => id !== event.pointerId)[1];
      const was = Math.hypot(before[0] - other[0], before[1] - other[1]);
      const is = Math.hypot(now[0] - other[0], now[1] - other[1]);
      plane.zoomBy(is / Math.max(1, was), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
    } else {
      plane.moveBy(dx, dy);
    }
    held.set(event.pointerId, now);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (held.size === 1 && travelled < 6) plane.choose(...at(event));
    held.delete(event.pointerId);
  });
  canvas.addEventListener("pointercancel", (event) => held.delete(event.pointerId));
  canvas.addEventListener("pointerleave", () => plane.leave());
  canvas.addEventListener("keydown", (event) => {
    const step = 60;
    const keys = {
      ArrowLeft: () => plane.moveBy(step, 0), ArrowRight: () => plane.moveBy(-step, 0),
      ArrowUp: () => plane.moveBy(0, step), ArrowDown: () => plane.moveBy(0, -step),
      "+": () => plane.zoomBy(1.4), "=": () => plane.zoomBy(1.4), "-": () => plane.zoomBy(1 / 1.4),
      0: () => plane.whole(),
      Enter: () => plane.choose(...plane.size().map((s) => s / 2)),
    };
    if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
  });
  $("closer").addEventListener("click", () => plane.zoomBy(1.5));
  $("farther").addEventListener("click", () => plane.zoomBy(1 / 1.5));
  $("whole").addEventListener("click", () => plane.whole());
  new ResizeObserver(() => plane.draw()).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plane.draw());
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
    else complain("Drop a picture file; links and text can't be searched with.");
  });
  document.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
  });
}

function wireFilter() {
  const filter = () => {
    $("all").hidden = !$("class").value;
    if (state.query) search(state.query);
  };
  $("class").addEventListener("change", filter);
  $("all").addEventListener("click", () => { $("class").value = ""; filter(); $("class").focus(); });
  $("some").addEventListener("click", () => surprise().catch((error) => complain(sentence(error.message))));
}

async function start() {
  history.replaceState(null, "", location.pathname); // the token is in a cookie now
  try {
    state.about = await ask("api/about");
  } catch (error) {
    $("about").textContent = "";
    complain(sentence(error.message));
    return;
  }
  const about = state.about;
  const groups = about.classes.length ? ` of ${pixels.format(about.classes.length)} classes` : "";
  $("about").textContent = `${about.title}: ${pixels.format(about.items)} items${groups}`;
  document.title = `${about.title} · nofuss search`;
  $("classes").replaceChildren(...about.classes.map((name) => new Option(name, name)));
  $("drop").hidden = !about.pictures;
  sharp($("query"));
  sharp($("tip-picture"));
  if (about.pictures) wireUploads();
  wireFilter();
  wireMap();
  plane.load();
  await surprise().catch((error) => complain(sentence(error.message)));
}

start();
