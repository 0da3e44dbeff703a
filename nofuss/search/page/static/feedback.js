// Feedback on results: "the same", "not the same", kept at once; learning from it, and undoing that.
import { $, button, complain, element, icon, numbers, pictureOf, tell } from "./api.js";
import { again, present, refused, state } from "./search.js";

let last = null; // the place of the result that was marked last
let drawn = null; // the results that have buttons

const asked = () => (state.query.item ? { item: state.query.item } : { vector: state.query.vector });
const entries = () => [...$("results").children];

export function draw() {
  const { answer } = state, given = answer?.feedback; // none in a database, nor for items to start from
  $("teach").hidden = !given;
  if (answer?.results !== drawn) {
    [last, drawn] = [null, answer?.results];
    $("learned").hidden = true;
    if (given) entries().forEach(addButtons);
  }
  if (!given) return;
  entries().forEach((entry, at) => {
    const same = given.said[answer.results[at].item];
    entry.classList.toggle("same", same === true);
    entry.classList.toggle("other", same === false);
    for (const made of entry.querySelectorAll(".mark")) {
      made.setAttribute("aria-pressed", made.dataset.same === String(same));
    }
  });
  drawBar(given);
}

function addButtons(entry, at) {
  const { label, rank } = state.answer.results[at], what = `result ${rank}, ${label ?? "no label"}`;
  const make = (same, sign, words) => {
    const made = button("mark", icon(sign), (event) => press(at, same, event.shiftKey));
    made.dataset.same = same;
    made.title = same ? "the same (s); with Shift up to the last mark" : "not the same (n); with Shift up to the last mark";
    made.setAttribute("aria-label", `${words}: ${what}`);
    made.setAttribute("aria-pressed", "false");
    return made;
  };
  entry.append(element("div", "marks", make(true, "same", "the same"), make(false, "other", "not the same")));
}

function drawBar({ said, count, history }) {
  const { results } = state.answer, here = Object.values(said), same = here.filter(Boolean).length;
  const all = count > here.length ? `, ${numbers.format(count)} in all` : "";
  const words = here.length || count ? [`Marked: ${same} the same, ${here.length - same} not${all}`] :
    ["Mark what is the same (", icon("same"), ") and what is not (", icon("other"), "), and let the search learn from it.", element("span", "keys", " Keys: s, n, arrows.")];
  const parts = [element("span", "told", ...words)];
  if (here.length && here.length < results.length) {
    parts.push(button("", "Rest is the same", () => rest(true)), button("", "Rest is not", () => rest(false)));
  }
  if (count) parts.push(button("strong", "Learn from this", learn));
  if (history) parts.push(button("", "Undo what it learned last", undo));
  $("teach").replaceChildren(...parts);
}

function press(at, same, toLast) { // a second press takes it back; with Shift all up to the last one
  const { results, feedback } = state.answer;
  const [from, to] = toLast && last !== null ? [Math.min(last, at), Math.max(last, at)] : [at, at];
  const again = from === to && feedback.said[results[at].item] === same;
  last = at;
  give(results.slice(from, to + 1), again ? null : same);
}

function rest(same) {
  const { results, feedback } = state.answer;
  give(results.filter(({ item }) => feedback.said[item] === undefined), same);
}

async function give(results, same) {
  if (!results.length) return;
  const { query } = state;
  try {
    const said = results.map(({ item }) => ({ item, same }));
    const feedback = await tell("api/feedback", { query: asked(), said });
    if (query === state.query) present({ answer: { ...state.answer, feedback } });
  } catch (error) {
    complain(error.message);
  }
}

async function learn() {
  const before = state.answer.results.slice(0, 10);
  $("status").textContent = "Learning…";
  for (const made of $("teach").querySelectorAll("button")) made.disabled = true;
  try {
    const learned = await tell("api/learn", {});
    await again();
    if (state.answer) report(learned, before, state.answer.results.slice(0, 10));
  } catch (error) {
    $("status").textContent = "";
    await refused(error);
    draw();
  }
}

async function undo() {
  try {
    await tell("api/undo", {});
    await again();
    $("status").textContent = "Undone: the search is as it was before.";
  } catch (error) {
    await refused(error);
  }
}

function report({ marks, pairs, seconds, scores }, before, after) {
  const rank = new Map(before.map(({ item }, at) => [item, at]));
  const row = (results, isAfter) => results.map((result, at) => {
    const shown = element("span", "near", state.about.pictures ? pictureOf(result.item) : result.name);
    const was = rank.get(result.item);
    const words = !isAfter ? "" : was === undefined ? "new" : was === at ? "" : was > at ? `↑${was - at}` : `↓${at - was}`;
    shown.append(element("small", "", words));
    shown.title = result.label ?? result.name;
    return shown;
  });
  const percent = (fraction) => `${(100 * fraction).toFixed(1)}%`;
  const elsewhere = !scores ? "There are no classes without a mark to score it on." :
    `On the ${numbers.format(scores.classes)} classes without a mark, searched among themselves: Recall@1 ${scores["recall@1"].map(percent).join(" → ")}, ` +
    `MAP@R ${scores["map@r"].map(percent).join(" → ")} (${judged(scores.gain)}).`;
  $("learned").replaceChildren(
    element("p", "", element("b", "", `Learned from ${numbers.format(marks)} marks`), ` (${pairs} pairs) in ${seconds.toFixed(1)} s. ${elsewhere}`),
    element("p", "soft", "The first ten before"), element("div", "nears", ...row(before, false)),
    element("p", "soft", "and after"), element("div", "nears", ...row(after, true)),
    element("div", "bar", button("", "Undo", undo), button("", "Close", () => { $("learned").hidden = true; })),
  );
  $("learned").hidden = false;
}

function judged([mean, low, high]) {
  if (low > 0) return "better there too";
  return high < 0 ? "worse there: consider undoing it" : `no clear change there, ${(100 * mean).toFixed(2)} points`;
}

export function wire() { // arrows move between results, s and n mark the one in focus
  $("results").addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const all = entries(), at = all.indexOf(event.target.closest("li"));
    const columns = getComputedStyle($("results")).gridTemplateColumns.split(" ").length;
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
    if (step !== undefined) {
      all[at + step]?.querySelector(".open").focus();
    } else if (state.answer?.feedback && "sn".includes(event.key.toLowerCase())) {
      press(at, event.key.toLowerCase() === "s", event.shiftKey);
    } else {
      return;
    }
    event.preventDefault();
  });
}
