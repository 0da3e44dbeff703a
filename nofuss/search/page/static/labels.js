// Doubtful labels: each with the neighbours that contradict it, corrected by a click. What is said counts
// at once, for this search; `nofuss train --corrections` learns from it.
import { $, ask, button, className, complain, element, leaf, numbers, pictureOf, sentence, tell } from "./api.js";
import { again, refused, search, state } from "./search.js";

let all = []; // the doubtful labels, as the server listed them and as they are judged since
let shown = 6;

export async function load() {
  try {
    all = (await ask("api/labels")).labels;
  } catch (error) {
    say(sentence(error.message));
    return;
  }
  $("more-doubts").onclick = () => { shown += 12; draw(); };
  draw();
}

function say(words) {
  $("doubts").hidden = !state.about.classes.length;
  $("doubts-help").textContent = words;
}

function introduce() {
  const count = all.length, judged = all.filter((doubt) => doubt.judged !== null).length;
  $("doubts-title").textContent = count ? `Doubtful labels: ${numbers.format(count)}` : "Doubtful labels";
  say(!count ? "None: no label is contradicted by its nearest neighbours." :
    "The nearest neighbours of these items are of another class. Say what is right: the data stay as they are, " +
    `feedback.jsonl in the run keeps what you say${judged ? ` (${judged} so far)` : ""}, and this search goes by it at once. ` +
    "To learn from it: nofuss train DATA --corrections RUN/feedback.jsonl");
}

function draw() {
  introduce();
  $("doubtful").replaceChildren(...all.slice(0, shown).map(card));
  $("more-doubts").hidden = all.length <= shown;
}

function card(doubt) {
  const picture = button("look", "", () => { search(doubt); $("results-title").scrollIntoView(); });
  picture.append(state.about.pictures ? pictureOf(doubt.item) : doubt.name);
  picture.setAttribute("aria-label", `${doubt.name}, search from this`);
  const near = doubt.neighbours.map((other) => {
    const image = element("span", "near", state.about.pictures ? pictureOf(other.item) : other.name);
    image.title = other.label ?? "no label";
    image.classList.toggle("other", other.label !== doubt.suggested);
    return image;
  });
  const claim = doubt.kind === "copy" ? "a copy is " : `${doubt.votes} of ${near.length} neighbours are `;
  const evidence = element("div", "evidence", element("p", "", claim, className(doubt.suggested)), element("div", "nears", ...near));
  const words = element("p", "", "labelled ", className(doubt.label));
  const entry = element("li", "doubt", picture, element("div", "said", words, evidence, choices(doubt)));
  entry.classList.toggle("judged", doubt.judged !== null);
  return entry;
}

function choices(doubt) {
  const { label, suggested, judged } = doubt;
  const choice = (name, words) => {
    const made = button("choice", words, () => judge(doubt, judged === name ? null : name));
    made.setAttribute("aria-pressed", judged === name);
    return made;
  };
  const other = element("input", "another");
  other.placeholder = "another class";
  other.setAttribute("list", "classes");
  other.setAttribute("aria-label", `The right class of ${doubt.name}`);
  if (judged !== null && judged !== label && judged !== suggested) other.value = judged;
  other.addEventListener("change", () => judge(doubt, other.value.trim() || null));
  return element("div", "choices", choice(suggested, `It is ${leaf(suggested)}`), choice(label, `${leaf(label)} is right`), other);
}

async function judge(doubt, label) {
  try {
    doubt.judged = (await tell("api/labels", { item: doubt.item, label })).judged;
    complain("");
    again().catch((error) => complain(error.message));
  } catch (error) {
    await refused(error);
    $("error").scrollIntoView({ block: "center" });
    if (!all.includes(doubt)) return; // they were listed anew
  }
  const entry = $("doubtful").children[all.indexOf(doubt)], held = document.activeElement;
  const at = [...entry.querySelectorAll(".choices > *")].indexOf(held);
  entry.querySelector(".choices").replaceWith(choices(doubt));
  entry.classList.toggle("judged", doubt.judged !== null);
  entry.querySelectorAll(".choices > *")[at]?.focus(); // where it was
  introduce();
}
