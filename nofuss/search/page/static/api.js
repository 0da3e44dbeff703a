// Requests to the server, and the elements of which all parts of the page are made. Names of classes
// and files are only ever set as text.

export const $ = (id) => document.getElementById(id);
export const numbers = new Intl.NumberFormat("en");

export async function ask(address, options) {
  const answer = await fetch(address, options);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw Object.assign(new Error(content.error || `the server answered ${answer.status}`), { status: answer.status });
  return content;
}

export function tell(address, content) { // a POST of JSON
  const headers = { "Content-Type": "application/json" };
  return ask(address, { method: "POST", body: JSON.stringify(content), headers });
}

export function complain(message) {
  $("error").textContent = message ? sentence(message) : "";
  $("error").hidden = !message;
}

export function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (words.endsWith(".") ? "" : ".");
}

export function element(tag, kind, ...content) {
  const made = document.createElement(tag);
  if (kind) made.className = kind;
  made.append(...content);
  return made;
}

export function button(kind, words, action) {
  const made = element("button", kind, words);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}

const DRAWN = { // signs that fonts may lack, on a square of 20
  same: "M3 7h14M3 13h14",
  other: "M3 7h14M3 13h14M13 2 7 18",
  good: "m3 11 5 5 9-12",
  unsure: "M6 7a4 4 0 1 1 5.6 3.6C10.4 11.2 10 12 10 13M10 17v.1",
  nothing: "m4 4 12 12M16 4 4 16",
};

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS(svg.namespaceURI, "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", DRAWN[name]);
  svg.append(path);
  return svg;
}

export function pictureOf(item) {
  const image = element("img");
  image.alt = "";
  image.loading = "lazy";
  sharp(image);
  image.src = `pictures/${item}`;
  return image;
}

export function sharp(image) { // small pictures are enlarged: show their pixels, do not blur them
  image.addEventListener("load", () => image.classList.toggle("pixel", image.naturalWidth <= 64));
}

// The name of a class in nested folders, "Packages/Juice/Lemon": its last part, and the way to it.
export const leaf = (label) => label.split("/").filter(Boolean).pop() ?? label;
export const way = (label) => label.split("/").filter(Boolean).slice(0, -1).join(" / ");

export function className(label, { short = false } = {}) {
  const name = label === null ? "no label" : leaf(label);
  const parts = name.split(/(?<=_)/).flatMap((part) => [part, element("wbr")]); // lines may end behind _
  const named = element("span", "class", element("b", "label", ...parts));
  const path = label === null ? "" : way(label);
  if (path) named.append(" ", element("span", "way", short ? leaf(way(label)).trim() : path));
  return named;
}
