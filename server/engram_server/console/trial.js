// @ts-check
/** Trying a taught task on new photos: one in full, or a list of many. */

import { json } from "./api.js";
import { renderAnswer } from "./answer.js";
import { correction } from "./correct.js";
import { decode, look, thumbnail } from "./photos.js";
import { picker, takeDrops } from "./picker.js";
import { displayLabel, errorBox, h, percent } from "./ui.js";

const AT_ONCE = 4; // requests in flight

export class Trial {
  /**
   * @param {() => string} task the task to try
   * @param {() => Promise<void>} corrected a photo was made an example
   */
  constructor(task, corrected) {
    this.task = task;
    this.corrected = corrected;
    this.triedTask = "";
    this.answers = h("div", { class: "tried", "aria-live": "polite" });
    const take = (/** @type {File[]} */ files) => this.#try(files);
    this.element = h(
      "section",
      { class: "panel trial", id: "trial", "aria-labelledby": "trial-title" },
      h("h2", { id: "trial-title" }, "Try photos"),
      h("div", { class: "actions" }, ...picker({ what: "photos", several: true, take })),
      h("p", { class: "hint droppable" }, "or drop them here."),
      this.answers,
    );
    takeDrops(this.element, take);
  }

  /** @param {boolean} shown hidden, not removed, so that it keeps the focus */
  show(shown) {
    this.element.hidden = !shown;
    if (this.triedTask !== this.task()) this.answers.replaceChildren();
  }

  /** @param {File[]} files */
  async #try(files) {
    if (!files.length) return;
    this.triedTask = this.task();
    if (files.length === 1) {
      this.answers.replaceChildren(h("p", { class: "waiting" }, "Predicting…"));
      await this.#tryOne(files[0]);
      return;
    }
    const rows = files.map((file) => ({ file, row: h("li", { class: "waiting" }, file.name) }));
    this.answers.replaceChildren(h("ul", { class: "tried-list" }, ...rows.map(({ row }) => row)));
    const waiting = rows.values();
    const work = async () => {
      for (const { file, row } of waiting) await this.#fill(row, file);
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
  }

  /** @param {File} file */
  async #predict(file) {
    const query = new URLSearchParams({ tasks: this.triedTask });
    const headers = { "Content-Type": "application/octet-stream" };
    const answer = await json(`predict?${query}`, { method: "POST", body: file, headers });
    return answer.images[0].tasks[this.triedTask];
  }

  /**
   * A line of the list: the picture, the best answer, and the correction.
   * @param {HTMLElement} row
   * @param {File} file
   */
  async #fill(row, file) {
    const digest = await look(file);
    try {
      const found = await this.#predict(file);
      const again = async () => {
        await Promise.all([this.#fill(row, file), this.corrected()]);
      };
      const best = found.predictions?.[0];
      const unknown = found.in_distribution === false && h("span", { class: "tag" }, "Out of distribution");
      row.classList.remove("waiting");
      row.replaceChildren(
        thumbnail(digest),
        h(
          "div",
          { class: "grow" },
          h("p", { class: "photo-title" }, file.name),
          h("p", {}, h("b", {}, best ? displayLabel(best.label) : "No label"), best ? ` ${percent(best.score)} ` : "", unknown),
          correction(this.triedTask, found, { file, digest }, again),
        ),
      );
    } catch (error) {
      row.classList.remove("waiting");
      row.replaceChildren(thumbnail(digest), h("div", { class: "grow" }, h("p", { class: "photo-title" }, file.name), errorBox(error)));
    }
  }

  /** @param {File} file */
  async #tryOne(file) {
    const [digest, shown] = [await look(file), await decode(file)];
    const task = this.triedTask;
    try {
      const found = await this.#predict(file);
      const again = async () => {
        await Promise.all([this.#tryOne(file), this.corrected()]);
        if (document.activeElement === document.body)
          /** @type {HTMLElement | null} */ (this.answers.querySelector(".correct button"))?.focus();
      };
      shown?.canvas.setAttribute("role", "img");
      shown?.canvas.setAttribute("aria-label", file.name);
      const text = h("div", { class: "grow" }, ...renderAnswer(found));
      const inDistribution = found.in_distribution === false && "false";
      const card = h("article", { class: "card", "data-task": task, "data-in-distribution": inDistribution });
      card.append(...(shown ? [shown.canvas] : []), text);
      text.append(correction(task, found, { file, digest }, again) ?? "");
      this.answers.replaceChildren(card);
    } catch (error) {
      this.answers.replaceChildren(errorBox(error));
    }
  }
}
