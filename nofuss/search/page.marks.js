// Marks "same" and "not the same" on results, kept at once; learning from them, and undoing it.
"use strict";

const SAME = "＝", OTHER = "≠";

const marks = {
  given: {}, count: 0, lessons: 0, last: null, results: [],

  // Show the marks of the query that was just answered; null where there is none.
  async show(answer) {
    this.given = {};
    const teachable = answer && state.about.own_index; // a database is searched, not taught
    $("teach").hidden = !teachable;
    $("lesson").hidden = true;
    if (!teachable) return;
    this.results = answer.results;
    for (const [at, entry] of [...$("results").children].entries()) this.addButtons(entry, at);
    const asked = state.query;
    try {
      const found = await ask(`api/marks?${new URLSearchParams(this.query())}`);
      if (asked === state.query) this.take(found);
    } catch (error) {
      complain(error.message);
    }
  },

  query() { return state.query.key ? { like: state.query.key } : { vector: state.query.vector }; },

  take({ marks: given, count, lessons }) {
    Object.assign(this, { given, count, lessons });
    for (const [at, entry] of [...$("results").children].entries()) {
      const same = given[this.results[at]?.key];
      entry.classList.toggle("same", same === true);
      entry.classList.toggle("other", same === false);
      for (const made of entry.querySelectorAll(".mark")) {
        made.setAttribute("aria-pressed", made.dataset.same === String(same));
      }
    }
    this.drawBar();
  },

  addButtons(entry, at) {
    const { label, rank } = this.results[at], what = `result ${rank}, ${label ?? "no label"}`;
    const make = (same, sign, words) => {
      const made = button("mark", sign, (event) => this.press(at, same, event.shiftKey));
      made.dataset.same = same;
      made.title = same ? "the same (s); with Shift up to the last mark" : "not the same (n); with Shift up to the last mark";
      made.setAttribute("aria-label", `${words}: ${what}`);
      made.setAttribute("aria-pressed", "false");
      return made;
    };
    entry.append(element("div", "marks", make(true, SAME, "the same"), make(false, OTHER, "not the same")));
  },

  press(at, same, toLast) { // a second press takes the mark back; with Shift all up to the last one
    const from = toLast && this.last !== null ? Math.min(this.last, at) : at;
    const to = toLast && this.last !== null ? Math.max(this.last, at) : at;
    const again = from === to && this.given[this.results[at].key] === same;
    this.last = at;
    this.give(this.results.slice(from, to + 1), again ? null : same);
  },

  rest(same) { this.give(this.results.filter(({ key }) => this.given[key] === undefined), same); },

  async give(results, same) {
    if (!results.length) return;
    try {
      const given = results.map(({ key }) => ({ item: key, same }));
      this.take(await tell("api/marks", { query: this.query(), marks: given }));
    } catch (error) {
      complain(error.message);
    }
  },

  drawBar() {
    const here = Object.values(this.given), same = here.filter(Boolean).length;
    const all = this.count > here.length ? `, ${numbers.format(this.count)} in all` : "";
    const words = here.length || this.count ? `Marked: ${same} the same, ${here.length - same} not${all}` :
      `Mark what is the same (${SAME}) and what is not (${OTHER}), and let the model learn from it. Keys: s, n, arrows.`;
    const parts = [element("span", "told", words)];
    if (here.length && here.length < this.results.length) {
      parts.push(button("", `Rest is the same`, () => this.rest(true)), button("", `Rest is not`, () => this.rest(false)));
    }
    if (this.count) {
      parts.push(button("strong", "Learn from this", () => this.learn()));
      const table = element("a", "soft", "marks.csv");
      table.href = "api/marks.csv";
      table.download = "marks.csv";
      parts.push(table);
    }
    if (this.lessons) parts.push(button("", "Undo the last lesson", () => this.undo()));
    $("teach").replaceChildren(...parts);
  },

  async learn() {
    const before = this.results.slice(0, 10), query = state.query;
    $("status").textContent = "Learning…";
    for (const made of $("teach").querySelectorAll("button")) made.disabled = true;
    try {
      const lesson = await tell("api/learn", { query: this.query() });
      await this.changed(query, lesson);
      this.report(lesson, before, this.results.slice(0, 10));
    } catch (error) {
      $("status").textContent = "";
      complain(error.message);
      this.drawBar();
    }
  },

  async undo() {
    const query = state.query;
    try {
      const undone = await tell("api/undo", { query: this.query() });
      await this.changed(query, undone);
      $("status").textContent = "Undone: the model is as it was before the last lesson.";
    } catch (error) {
      complain(error.message);
    }
  },

  // The model is another one now: search again, an uploaded picture by its new vector.
  async changed(query, { vector }) {
    state.about = await ask("api/about");
    describe(state.about);
    await search(vector ? { ...query, vector } : query, { how: "replace", k: state.k });
  },

  report({ marks: count, pairs, seconds, scores }, before, after) {
    const rank = new Map(before.map(({ key }, at) => [key, at])), row = (results, isAfter) => results.map((result, at) => {
      const shown = element("span", "near", state.about.pictures ? pictureOf(result.item) : result.name);
      const was = rank.get(result.key);
      const words = !isAfter ? "" : was === undefined ? "new" : was === at ? "" : was > at ? `↑${was - at}` : `↓${at - was}`;
      shown.append(element("small", "", words));
      shown.title = result.label ?? result.name;
      return shown;
    });
    const percent = (share) => `${(100 * share).toFixed(1)}%`;
    const elsewhere = !scores ? "There are no classes without a mark to score it on." :
      `On the ${numbers.format(scores.classes)} classes without a mark, searched among themselves: Recall@1 ${scores["recall@1"].map(percent).join(" → ")}, ` +
      `MAP@R ${scores["map@r"].map(percent).join(" → ")} (${this.judged(scores.gain)}).`;
    $("lesson").replaceChildren(
      element("p", "", element("b", "", `Learned from ${numbers.format(count)} marks`), ` (${pairs} pairs) in ${seconds.toFixed(1)} s. ${elsewhere}`),
      element("p", "soft", "The first ten before"), element("div", "nears", ...row(before, false)),
      element("p", "soft", "and after"), element("div", "nears", ...row(after, true)),
      element("div", "bar", button("", "Undo", () => this.undo()), button("", "Close", () => { $("lesson").hidden = true; })),
    );
    $("lesson").hidden = false;
  },

  judged([mean, low, high]) {
    if (low > 0) return "better there too";
    return high < 0 ? "worse there: consider undoing it" : `no clear change there, ${(100 * mean).toFixed(2)} points`;
  },

  wire() { // arrows move between results, s and n mark the one in focus
    $("results").addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const entries = [...$("results").children], at = entries.indexOf(event.target.closest("li"));
      const columns = getComputedStyle($("results")).gridTemplateColumns.split(" ").length;
      const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[event.key];
      if (step !== undefined) {
        entries[at + step]?.querySelector(".open").focus();
      } else if (state.query && "sn".includes(event.key.toLowerCase())) {
        this.press(at, event.key.toLowerCase() === "s", event.shiftKey);
      } else {
        return;
      }
      event.preventDefault();
    });
  },
};
