// Doubtful labels: each with the neighbours that contradict it, judged by a click. Judgements are
// written to corrections.csv in the run; `nofuss train --corrections` applies them.
"use strict";

const suspects = {
  all: [], shown: 6,

  async load() {
    try {
      this.all = (await ask("api/suspects")).suspects;
    } catch (error) {
      this.say(sentence(error.message));
      return;
    }
    $("more-suspects").addEventListener("click", () => { this.shown += 12; this.draw(); });
    this.draw();
  },

  say(words) {
    $("repair").hidden = !state.about.classes.length;
    $("suspects-help").textContent = words;
  },

  introduce() {
    const count = this.all.length, judged = this.all.filter((suspect) => suspect.judged !== null).length;
    $("suspects-title").textContent = count ? `Doubtful labels: ${numbers.format(count)}` : "Doubtful labels";
    this.say(!count ? "None: no label is contradicted by its nearest neighbours." :
      "The nearest neighbours of these items are of another class. Say what is right: the data stay as they are, and " +
      `corrections.csv in the run keeps what you say${judged ? ` (${judged} so far)` : ""}. ` +
      "Apply it with: nofuss train DATA --corrections RUN/corrections.csv");
  },

  draw() {
    this.introduce();
    $("suspects").replaceChildren(...this.all.slice(0, this.shown).map((suspect) => this.card(suspect)));
    $("more-suspects").hidden = this.all.length <= this.shown;
  },

  card(suspect) {
    const picture = button("look", "", () => { search(suspect); $("results-title").scrollIntoView(); });
    picture.append(state.about.pictures ? pictureOf(suspect.item) : suspect.name);
    picture.setAttribute("aria-label", `${suspect.name}, search from this`);
    const near = suspect.neighbours.map((other) => {
      const shown = element("span", "near", state.about.pictures ? pictureOf(other.item) : other.name);
      shown.title = other.label;
      shown.classList.toggle("other", other.label !== suspect.suggested);
      return shown;
    });
    const claim = suspect.kind === "copy" ? "a copy is " : `${suspect.votes} of ${near.length} neighbours are `;
    const evidence = element("div", "evidence", element("p", "", claim, className(suspect.suggested)), element("div", "nears", ...near));
    const words = element("p", "", "labelled ", className(suspect.label));
    const entry = element("li", "suspect", picture, element("div", "said", words, evidence, this.choices(suspect)));
    entry.classList.toggle("judged", suspect.judged !== null);
    return entry;
  },

  choices(suspect) {
    const { label, suggested, judged } = suspect;
    const choice = (name, words) => {
      const made = button("choice", words, () => this.judge(suspect, judged === name ? null : name));
      made.setAttribute("aria-pressed", judged === name);
      return made;
    };
    const other = element("input", "another");
    other.placeholder = "another class";
    other.setAttribute("list", "classes");
    other.setAttribute("aria-label", `The right class of ${suspect.name}`);
    if (judged !== null && judged !== label && judged !== suggested) other.value = judged;
    other.addEventListener("change", () => this.judge(suspect, other.value.trim() || null));
    return element("div", "choices", choice(suggested, `It is ${leaf(suggested)}`), choice(label, `${leaf(label)} is right`), other);
  },

  async judge(suspect, label) {
    try {
      suspect.judged = (await tell("api/suspects", { item: suspect.key, label })).judged;
      complain("");
    } catch (error) {
      complain(error.message);
      $("error").scrollIntoView({ block: "center" });
    }
    const entry = $("suspects").children[this.all.indexOf(suspect)], held = document.activeElement;
    const at = [...entry.querySelectorAll(".choices > *")].indexOf(held);
    entry.querySelector(".choices").replaceWith(this.choices(suspect));
    entry.classList.toggle("judged", suspect.judged !== null);
    entry.querySelectorAll(".choices > *")[at]?.focus(); // where it was
    this.introduce();
  },
};
