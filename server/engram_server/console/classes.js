// @ts-check
/** The classes of a task that is being taught, side by side, with their photos. */

import { look, nameOf, thumbnail } from "./photos.js";
import { picker, takeDrops } from "./picker.js";
import { h, plural } from "./ui.js";

/**
 * @typedef {import("./examples.js").Photo} Photo
 * @typedef {import("./examples.js").Taught} Taught
 */

const SHOWN = 60; // examples of a class that are shown; of more, how many

export class Board {
  /**
   * @param {HTMLElement} place
   * @param {(digest: string) => Promise<void>} takeAway an example that was taught
   */
  constructor(place, takeAway) {
    this.place = place;
    this.takeAway = takeAway;
    this.several = false; // may a photo have several labels?
    /** @type {Map<string, string[]>} labels that photos were taught with, by digest */
    this.before = new Map();
    /** @type {Column[]} */
    this.columns = [];
  }

  add(label = "") {
    const column = new Column(this, label);
    this.columns.push(column);
    this.place.append(column.element);
    this.#number();
    return column;
  }

  /** @param {Column} column */
  remove(column) {
    const at = this.columns.indexOf(column);
    this.columns.splice(at, 1);
    column.element.remove();
    this.#number();
    (this.columns[at] ?? this.columns[at - 1])?.focus();
  }

  clear() {
    this.columns = [];
    this.place.replaceChildren();
  }

  /**
   * The classes that a task has been taught, and what is still to be.
   * @param {Taught | null} found
   * @param {boolean} several
   */
  show(found, several) {
    this.several = several;
    this.before = new Map(found?.examples.map((each) => [each.digest, each.labels]));
    for (const column of this.columns) column.examples = [];
    for (const { label } of found?.classes ?? []) {
      const column = this.columns.find((each) => each.label === label) ?? this.add(label);
      column.examples = found?.examples.filter((each) => each.labels.includes(label)) ?? [];
    }
    for (const column of [...this.columns]) {
      const unused = found && !column.examples.length && !column.photos.length && !column.typed;
      if (unused) {
        this.columns.splice(this.columns.indexOf(column), 1);
        column.element.remove();
      }
    }
    this.#number();
    for (const column of this.columns) column.refresh();
  }

  /** @param {boolean} several */
  allowSeveral(several) {
    this.several = several;
    for (const column of this.columns) column.setMessage("");
  }

  /** The class that the keyboard is in. */
  focused() {
    return this.columns.find((column) => column.element.contains(document.activeElement));
  }

  /** Wait until all added photos are read. */
  async settled() {
    await Promise.all(this.columns.map((column) => column.reading));
  }

  /**
   * A photo's class among those to be taught, other than the one that asks; a photo has one.
   * @param {string} digest
   * @param {Column} asking
   */
  holder(digest, asking) {
    return this.columns.find(
      (column) => column !== asking && column.photos.some((photo) => photo.digest === digest),
    );
  }

  /**
   * Validate the form: shows and returns the first error; "" if there is none.
   * @param {boolean} isNew
   * @param {boolean} byName names are read: classes need no photos
   */
  check(isNew, byName = false) {
    for (const column of this.columns) column.setMessage("");
    const filled = this.columns.filter((column) => column.photos.length);
    const unnamed = filled.find((column) => !column.label);
    if (unnamed) {
      unnamed.setMessage("Name this class.");
      unnamed.focus();
      return "A class has photos, and no name.";
    }
    const twice = this.columns.find(
      (column, at) => column.label && this.columns.findIndex((each) => each.label === column.label) < at,
    );
    if (twice) {
      twice.setMessage(`There is a class ${twice.label} already.`);
      twice.focus();
      return `Two classes are called ${twice.label}.`;
    }
    if (byName) return isNew && this.names().length < 2 ? "Name at least two classes." : "";
    if (isNew && filled.length < 2) return "Add photos to at least two classes.";
    if (!filled.length) return "There is nothing new to teach. Add photos to a class.";
    return "";
  }

  /** @returns {string[]} of all classes that have one */
  names() {
    return this.columns.map((column) => column.label).filter(Boolean);
  }

  /**
   * All photos that are to be taught. With several labels a photo keeps those it has.
   * @returns {Photo[]}
   */
  photos() {
    /** @type {Map<string, Photo>} */
    const found = new Map();
    for (const column of this.columns) {
      for (const photo of column.photos) {
        const kept = this.several ? this.before.get(photo.digest) : null;
        const labels = found.get(photo.digest)?.labels ?? kept ?? [];
        found.set(photo.digest, { ...photo, labels: [...labels, column.label] });
      }
    }
    return [...found.values()];
  }

  /** @param {Photo[]} photos */
  taught(photos) {
    const digests = new Set(photos.map((photo) => photo.digest));
    for (const column of this.columns)
      column.photos = column.photos.filter((photo) => !digests.has(photo.digest));
  }

  #number() {
    for (const [at, column] of this.columns.entries()) column.number(at + 1, this.columns.length > 2);
  }
}

class Column {
  /**
   * @param {Board} board
   * @param {string} label of a class that was taught; such a name stays
   */
  constructor(board, label) {
    this.board = board;
    /** @type {{digest: string, file: File}[]} to be taught */
    this.photos = [];
    /** @type {{digest: string}[]} taught */
    this.examples = [];
    this.reading = Promise.resolve();
    this.place = 0;
    this.removable = false;
    this.name = /** @type {HTMLInputElement} */ (
      h("input", { value: label, autocomplete: "off", maxlength: 256, spellcheck: "false" })
    );
    this.count = h("span", { class: "hint", role: "status" });
    this.invitation = h("span", { class: "hint droppable" }, "or drop them here");
    this.tiles = h("ul", { class: "photos" });
    this.errors = h("p", { class: "field-error", role: "alert" });
    this.drop = h(
      "button",
      { type: "button", class: "quiet remove", onclick: () => board.remove(this) },
      "×",
    );
    const take = (/** @type {File[]} */ files) => this.read(files);
    this.ways = h(
      "div",
      { class: "actions", role: "group" },
      ...picker({ what: "photos", several: true, take }),
      this.invitation,
      this.count,
    );
    this.name.addEventListener("input", () => this.#describe());
    this.element = h(
      "li",
      { class: "class" },
      h("header", {}, this.name, this.drop),
      this.errors,
      this.tiles,
      this.ways,
    );
    takeDrops(this.element, take);
    this.refresh();
  }

  get label() {
    return this.name.value.trim();
  }

  /** Whether the class has a name and is not taught yet. */
  get typed() {
    return !this.name.readOnly && this.label !== "";
  }

  focus() {
    this.name.focus();
  }

  /**
   * @param {number} place
   * @param {boolean} removable
   */
  number(place, removable) {
    this.name.setAttribute("aria-label", `Name of class ${place}`);
    this.name.setAttribute("placeholder", `Class ${place}`);
    this.drop.setAttribute("aria-label", `Remove class ${place}`);
    this.removable = removable;
    this.drop.hidden = !removable || this.examples.length > 0;
    this.place = place;
    this.#describe();
  }

  #describe() {
    this.ways.setAttribute("aria-label", `Photos of ${this.label || `class ${this.place}`}`);
  }

  /** @param {string} text */
  setMessage(text) {
    this.errors.textContent = text;
    this.name.setAttribute("aria-invalid", String(text !== ""));
  }

  /** @param {File[]} files */
  read(files) {
    this.setMessage("");
    // One after the other: hundreds at once would take all memory.
    this.reading = this.reading.then(async () => {
      for (const file of files) {
        const digest = await look(file);
        const why = this.#whyNot(digest);
        if (why) this.setMessage(`${file.name} ${why}`);
        else this.photos.push({ digest, file });
        this.refresh();
      }
    });
  }

  /** @param {string} digest */
  #whyNot(digest) {
    const here = [...this.photos, ...this.examples].some((each) => each.digest === digest);
    if (here) return "is in this class already.";
    const other = this.board.several ? null : this.board.holder(digest, this);
    return other ? `is in ${other.label || "another class"} too: a photo has one class.` : "";
  }

  refresh() {
    const shown = this.examples.slice(0, SHOWN);
    const more = this.examples.length - shown.length;
    this.name.readOnly = this.examples.length > 0;
    this.drop.hidden = !this.removable || this.examples.length > 0;
    this.tiles.replaceChildren(
      ...shown.map(({ digest }) => this.#tile(digest, false)),
      ...(more ? [h("li", { class: "hint more" }, `and ${more.toLocaleString("en")} more`)] : []),
      ...this.photos.map(({ digest }) => this.#tile(digest, true)),
    );
    const [old, fresh] = [this.examples.length, this.photos.length];
    const both = `${old.toLocaleString("en")} taught, ${fresh} new`;
    const one = old + fresh ? plural(old + fresh, "photo") : "";
    this.count.textContent = old && fresh ? both : one;
    this.invitation.hidden = old + fresh > 0;
  }

  /**
   * @param {string} digest
   * @param {boolean} fresh
   */
  #tile(digest, fresh) {
    const label = `Remove ${nameOf(digest)}`;
    const button = h("button", { type: "button", class: "remove", "aria-label": label }, "×");
    button.addEventListener("click", async () => {
      const at = [...this.tiles.children].findIndex((tile) => tile.contains(button));
      button.setAttribute("disabled", "");
      if (fresh) this.photos = this.photos.filter((photo) => photo.digest !== digest);
      else await this.board.takeAway(digest);
      this.refresh();
      const next = this.tiles.children[Math.min(at, this.tiles.children.length - 1)];
      const place = next?.querySelector("button") ?? this.element.querySelector(".choose");
      /** @type {HTMLElement | null} */ (place)?.focus();
    });
    return h("li", { "data-fresh": fresh }, thumbnail(digest), button);
  }
}
