// The map of the page: items and proxies on a plane, coloured by class.
import { $, ask, leaf, sentence, sharp } from "./api.js";
import { search, state } from "./search.js";

export const plane = { // what is drawn, and which part of it one looks at
  canvas: $("map"),
  data: null, regions: [], zoom: 1, x: 0.5, y: 0.5, over: -1,
  only: null, // a Set of classes where the filter leaves some only

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
      $("map-stars").hidden = !this.data.stars.length;
      this.regions = regionsOf(this.data);
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
    this.only = state.answer?.classes ? new Set(state.answer.classes) : null;
    const { items, places, stars, classes } = this.data;
    const radius = Math.min(5, 1.4 + Math.sqrt(this.zoom)), dark = isDark();
    for (let i = 0; i < items.length; i++) {
      const [x, y] = this.onScreen(places[2 * i], places[2 * i + 1]);
      if (x < -9 || y < -9 || x > w + 9 || y > h + 9) continue;
      pen.globalAlpha = this.shows(classes[i]) ? 0.75 : 0.08;
      pen.fillStyle = colourOf(classes[i], dark);
      pen.beginPath();
      pen.arc(x, y, radius, 0, 7);
      pen.fill();
    }
    pen.globalAlpha = 1;
    pen.fillStyle = colour("--ink");
    pen.strokeStyle = colour("--wash");
    for (let i = 0; i < stars.length; i += 2) {
      if (this.showsStar(i / 2)) star(pen, ...this.onScreen(stars[i], stars[i + 1]), 6);
    }
    this.nameRegions(pen, colour("--ink"), colour("--wash"));
    if (state.query && state.answer) {
      pen.strokeStyle = colour("--accent");
      pen.lineWidth = 2;
      for (const result of state.answer.results) {
        if (!result.place) continue;
        pen.beginPath();
        pen.arc(...this.onScreen(...result.place), 6, 0, 7);
        pen.stroke();
      }
      if (state.answer.place) cross(pen, ...this.onScreen(...state.answer.place), colour("--ink"), colour("--paper"));
      pen.lineWidth = 1;
    }
    if (this.over >= 0) {
      pen.fillStyle = colour("--accent");
      pen.beginPath();
      pen.arc(...this.onScreen(places[2 * this.over], places[2 * this.over + 1]), 6, 0, 7);
      pen.fill();
    }
  },

  shows(code) { return !this.only || this.only.has(code); },

  showsStar(i) { return !this.only || this.only.has(state.about.classes.indexOf(this.data.star_names[i])); },

  // Names of classes, the largest first, wherever they do not cover another: more as one zooms in.
  nameRegions(pen, ink, halo) {
    const [w, h] = this.size(), taken = [];
    pen.font = "600 12px system-ui, sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.lineJoin = "round";
    for (const { code, place } of this.regions) {
      const [middle, below] = this.onScreen(...place), y = below - 15; // above the item, not on it
      if (!this.shows(code) || middle < 0 || y < 0 || middle > w || y > h) continue;
      const name = shortened(leaf(state.about.classes[code]), 22), half = pen.measureText(name).width / 2 + 5;
      const x = Math.min(Math.max(middle, half), w - half), box = [x - half, y - 10, x + half, y + 10];
      if (box[2] > w - 56 && box[1] < 150) continue; // the buttons are there
      if (taken.some((t) => box[0] < t[2] && t[0] < box[2] && box[1] < t[3] && t[1] < box[3])) continue;
      taken.push(box);
      pen.strokeStyle = halo;
      pen.lineWidth = 4;
      pen.strokeText(name, x, y);
      pen.fillStyle = ink;
      pen.fillText(name, x, y);
    }
    pen.lineWidth = 1;
    this.named = taken.length;
  },

  nearest(px, py) {
    if (!this.data) return -1;
    let best = -1, least = 144;
    for (let i = 0; i < this.data.items.length; i++) {
      if (!this.shows(this.data.classes[i])) continue;
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
      if (this.showsStar(i / 2) && (x - px) ** 2 + (y - py) ** 2 < 64) return i / 2;
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
      const address = `pictures/${this.data.items[item]}`;
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
    search({ item: this.data.items[item], label: code < 0 ? null : state.about.classes[code] });
    $("results-title").scrollIntoView({ block: "nearest" });
  },
};

// Where each class lies: its item nearest to the median of its places; the largest classes first.
function regionsOf({ places, classes }) {
  const members = new Map();
  classes.forEach((code, i) => {
    if (code >= 0) members.set(code, members.get(code) ?? []).get(code).push(i);
  });
  const middle = (values) => values.sort((a, b) => a - b)[values.length >> 1];
  const regions = [...members].map(([code, items]) => {
    const x = middle(items.map((i) => places[2 * i])), y = middle(items.map((i) => places[2 * i + 1]));
    const far = (i) => (places[2 * i] - x) ** 2 + (places[2 * i + 1] - y) ** 2;
    const best = items.reduce((a, b) => (far(b) < far(a) ? b : a));
    return { code, count: items.length, place: [places[2 * best], places[2 * best + 1]] };
  });
  return regions.sort((a, b) => b.count - a.count || a.code - b.code);
}

const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;

function colourOf(code, dark) { // neighbouring codes are far apart on the circle of hues
  if (code < 0) return dark ? "#9aa4b0" : "#5b6470";
  const hue = (code * 137.508) % 360, light = (dark ? 66 : 42) + ((code * 7) % 3 - 1) * 8;
  return `hsl(${hue.toFixed(0)} 62% ${light}%)`;
}

function shortened(words, most) {
  return words.length > most ? `${words.slice(0, most - 1)}…` : words;
}

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

export function wire() {
  const canvas = plane.canvas, held = new Map();
  let travelled = 0;
  sharp($("tip-picture"));
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
