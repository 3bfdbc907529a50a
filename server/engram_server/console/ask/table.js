// @ts-check
/** The table of answers for many photos: filter, sort, pages, downloads and corrections. */

import { distributionBadge } from "../answer.js";
import { NARROW, byId, choice, displayLabel, h, pager, percent, plural, saveAs } from "../ui.js";
import { correctMany } from "./correct-many.js";
import { thumbnailButton } from "./picture.js";
import { LOW_CONFIDENCE, labelCounts, reason, select, tasksOf, toCsv, toJson, top } from "./rows.js";

/** @typedef {import("./photo.js").Photo} Photo */

// Rows of a page, and tasks beside each other; more make the table unreadable.
const [ROWS, COLUMNS] = NARROW.matches ? [10, 3] : [20, 6];
/** @type {[import("./rows.js").Show, string][]} */
const SHOWN = [
  ["all", "All photos"],
  ["unknown", "Out of distribution"],
  ["uncertain", `Low confidence (under ${percent(LOW_CONFIDENCE)})`],
  ["unreadable", "Could not be read"],
];
/** @type {[import("./rows.js").Order, string][]} */
const ORDERS = [
  ["added", "As added"],
  ["name", "Name"],
  ["lowest", "Lowest score first"],
  ["highest", "Highest score first"],
];

export class Table {
  /** @type {Photo[]} */
  #photos = [];
  /** @type {import("./rows.js").View} */
  #view = { task: "", show: "all", label: "", order: "added" };
  #page = 0;
  /** @type {Set<Photo>} */
  #selected = new Set();
  /** @type {Map<Photo, {row: HTMLElement, result: unknown, problem: unknown}>} */
  #rows = new Map();
  /** @type {Photo[]} */
  #listed = [];
  #columns = "";

  /**
   * @param {{open: (photo: Photo) => void, remove: (photos: Set<Photo>) => void,
   *   again: (photos: Photo[]) => Promise<void>}} actions
   */
  constructor(actions) {
    this.actions = actions;
  }

  /** @param {Photo[]} photos */
  show(photos) {
    this.#photos = photos;
    const present = new Set(photos);
    for (const photo of this.#selected) if (!present.has(photo)) this.#selected.delete(photo);
    const tasks = tasksOf(photos);
    if (!tasks.includes(this.#view.task)) this.#view.task = "";
    const columns = this.#view.task ? [this.#view.task] : tasks.slice(0, COLUMNS);
    if (columns.join() !== this.#columns) {
      this.#columns = columns.join();
      this.#rows.clear();
      this.#listed = [];
      byId("table-head").replaceChildren(this.#head(columns));
    }
    this.#showTools(tasks);
    this.#showRows(columns);
  }

  #refresh() {
    this.show(this.#photos);
  }

  /** @param {Partial<import("./rows.js").View>} change */
  #change(change) {
    this.#view = { ...this.#view, ...change };
    this.#page = 0;
    this.#refresh();
  }

  // Filters and downloads

  /** @param {string[]} tasks */
  #showTools(tasks) {
    const view = this.#view;
    const labels = labelCounts(this.#photos, view);
    if (!labels.some(([label]) => label === view.label)) view.label = "";
    const state = JSON.stringify([view, tasks, labels]);
    const place = byId("table-tools");
    // The same tools again would take the focus from the one in use.
    if (place.dataset.state === state) return;
    const focused = document.activeElement?.getAttribute("name");
    place.dataset.state = state;
    place.replaceChildren(
      choice("Show", SHOWN, view.show, (value) =>
        this.#change({ show: /** @type {typeof view.show} */ (value) }),
      ),
      choice("Task", [["", "Any task"], ...tasks.map(same)], view.task, (task) =>
        this.#change({ task, label: "" }),
      ),
      choice(
        "Class",
        [["", "Any class"], ...labels.map(([label, count]) => counted(label, count))],
        view.label,
        (label) => this.#change({ label }),
      ),
      choice("Sort", ORDERS, view.order, (value) =>
        this.#change({ order: /** @type {typeof view.order} */ (value) }),
      ),
      this.#downloads(),
    );
    const again = focused && place.querySelector(`[name="${focused}"]`);
    if (again instanceof HTMLElement) again.focus();
  }

  #downloads() {
    const save = (/** @type {(photos: Photo[]) => string} */ write, /** @type {string} */ type) => {
      const kind = type.split("/")[1];
      saveAs(new Blob([write(select(this.#photos, this.#view))], { type }), `answers.${kind}`);
    };
    return h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: () => save(toCsv, "text/csv") }, "Download CSV"),
      h("button", { type: "button", onclick: () => save(toJson, "application/json") }, "Download JSON"),
    );
  }

  // Rows

  /** @param {string[]} columns */
  #head(columns) {
    const attributes = { scope: "col", role: "columnheader" };
    const names = ["Photo", ...(columns.length ? columns : ["Answer"])];
    return h(
      "tr",
      { role: "row" },
      h("th", attributes, h("span", { class: "unseen" }, "Select")),
      ...names.map((text) => h("th", attributes, text)),
    );
  }

  /** @param {string[]} columns */
  #showRows(columns) {
    const found = select(this.#photos, this.#view);
    this.#page = Math.min(this.#page, Math.max(0, Math.ceil(found.length / ROWS) - 1));
    const first = this.#page * ROWS;
    const page = found.slice(first, first + ROWS);
    for (const photo of page) this.#update(photo, columns);
    if (page.length !== this.#listed.length || page.some((photo, place) => photo !== this.#listed[place])) {
      this.#listed = page;
      byId("table-body").replaceChildren(...page.map((photo) => /** @type {any} */ (this.#rows.get(photo)).row));
    }
    const turn = (/** @type {number} */ by) => {
      this.#page += by;
      this.#refresh();
      byId("table-area").scrollIntoView({ block: "start" });
    };
    const pages = pager({
      first: first + 1,
      shown: page.length,
      total: found.length,
      back: () => turn(-1),
      forward: () => turn(1),
    });
    byId("table-pages").replaceChildren(...(pages ? [pages] : []));
    this.#showCount(found, columns.length);
    this.#showSelection(found);
  }

  /**
   * @param {Photo[]} found
   * @param {number} columns
   */
  #showCount(found, columns) {
    const all = this.#photos.length;
    const photos = found.length === all ? plural(all, "photo") : `${found.length} of ${plural(all, "photo")}`;
    const tasks = tasksOf(this.#photos).length;
    const hidden = tasks > columns ? ` The table shows ${columns} of ${tasks} tasks; downloads have all.` : "";
    byId("table-count").textContent = `${photos}.${hidden}`;
  }

  /**
   * Make the row of a photo anew if its answer changed.
   * @param {Photo} photo
   * @param {string[]} columns
   */
  #update(photo, columns) {
    const made = this.#rows.get(photo);
    if (made && made.result === photo.result && made.problem === photo.problem) return;
    const box = /** @type {HTMLInputElement} */ (
      h("input", { type: "checkbox", "aria-label": `Select ${photo.name}`, checked: this.#selected.has(photo) })
    );
    box.addEventListener("change", () => {
      if (box.checked) this.#selected.add(photo);
      else this.#selected.delete(photo);
      this.#refresh();
    });
    const row = h(
      "tr",
      { role: "row", "data-photo": photo.name },
      h("td", { role: "cell", class: "pick" }, box),
      h(
        "th",
        { role: "rowheader", scope: "row", class: "photo" },
        h(
          "div",
          {},
          thumbnailButton(photo, () => this.actions.open(photo)),
          h("span", { class: "file", title: photo.name }, photo.shortName),
        ),
      ),
      ...answerCells(photo, columns),
    );
    made?.row.replaceWith(row);
    this.#rows.set(photo, { row, result: photo.result, problem: photo.problem });
  }

  // Several at once

  /** @param {Photo[]} found */
  #showSelection(found) {
    const selected = this.#selected;
    for (const [photo, { row }] of this.#rows) {
      const box = row.querySelector("input");
      if (box) box.checked = selected.has(photo);
    }
    const place = byId("table-selection");
    const answered = [...selected].filter((photo) => photo.result).length;
    const state = JSON.stringify([this.#view, selected.size, answered, found.length]);
    if (place.dataset.state === state) return;
    place.dataset.state = state;
    const every = found.length > 0 && found.every((photo) => selected.has(photo));
    const toggle = () => {
      for (const photo of found) every ? selected.delete(photo) : selected.add(photo);
      this.#refresh();
    };
    // Answers that arrive must not take away a correction that is being entered.
    const subject = JSON.stringify([this.#view, [...selected].map((photo) => photo.name)]);
    const begun = place.dataset.subject === subject ? place.querySelector(".selection-work") : null;
    place.dataset.subject = subject;
    const work = begun instanceof HTMLElement ? begun : h("div", { class: "selection-work" });
    const actions = h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: toggle }, every ? "Select none" : `Select all ${found.length}`),
      ...(selected.size ? this.#selectionActions(work) : []),
    );
    if (begun) place.firstElementChild?.replaceWith(actions);
    else place.replaceChildren(actions, work);
  }

  /** @param {HTMLElement} work */
  #selectionActions(work) {
    const photos = [...this.#selected];
    const correct = () => work.replaceChildren(correctMany(photos, this.#view.task, this.actions.again));
    const remove = () => this.actions.remove(new Set(photos));
    const corrects = photos.some((photo) => photo.result);
    return [
      corrects && h("button", { type: "button", onclick: correct }, `Correct ${photos.length} selected…`),
      h("button", { type: "button", onclick: remove }, `Remove ${photos.length} selected`),
    ].filter((each) => each instanceof HTMLElement);
  }
}

/**
 * @param {string} text
 * @returns {[string, string]}
 */
function same(text) {
  return [text, text];
}

/**
 * @param {string} label
 * @param {number} count
 * @returns {[string, string]}
 */
function counted(label, count) {
  return [label, `${displayLabel(label)} (${count})`];
}

/**
 * @param {Photo} photo
 * @param {string[]} columns
 */
function answerCells(photo, columns) {
  const whole = { role: "cell", colspan: Math.max(1, columns.length) };
  if (photo.problem) return [h("td", { ...whole, class: "rejected" }, reason(photo))];
  const { result } = photo;
  if (!result) return [h("td", { ...whole, class: "hint" }, "Waiting")];
  return columns.map((task) =>
    h("td", { role: "cell" }, h("span", { class: "task-name" }, task), ...summary(result.tasks[task])),
  );
}

/** @param {import("../answer.js").Answer | undefined} answer */
function summary(answer) {
  if (!answer) return [h("span", { class: "hint" }, "not requested")];
  const best = top(answer);
  const badge = answer.in_distribution === false && distributionBadge("OOD");
  const score = best && h("span", { class: "score" }, percent(best.score));
  const text = best ? displayLabel(best.label) : otherwise(answer);
  return [h("span", { class: "label" }, text), score, badge].filter((each) => each instanceof HTMLElement);
}

/** @param {import("../answer.js").Answer} answer */
function otherwise({ error, values, embedding }) {
  if (error) return error;
  if (values) return values.map((value) => value.toPrecision(4)).join(" ");
  return embedding ? plural(embedding.length, "number") : "no label";
}
