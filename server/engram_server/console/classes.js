// @ts-check
/** The classes of a task that is being taught, side by side, with their photos. */

import { look, nameOf, thumbnail } from "./photos.js";
import { picker, takeDrops } from "./picker.js";
import { displayLabel, h, percent, plural } from "./ui.js";

/**
 * A photo to be taught, and why it cannot be read if that is known.
 * @typedef {{digest: string, file: File, reason?: string}} NewPhoto
 * @typedef {import("./examples.js").Photo} Photo
 * @typedef {import("./examples.js").Taught} Taught
 * @typedef {import("./picker.js").Found} Found
 */

const ORDER = new Intl.Collator("en", { numeric: true });
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
    for (const { label, accuracy } of found?.classes ?? []) {
      const column = this.columns.find((each) => each.label === label) ?? this.add(label);
      column.examples = (found?.examples ?? [])
        .filter((each) => each.labels.includes(label))
        .sort((one, other) => ORDER.compare(one.name ?? "", other.name ?? ""));
      column.accuracy = accuracy;
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

  /**
   * Add the photos of each folder to the class of its name.
   * @param {Found[]} found
   */
  addFolders(found) {
    /** @type {Map<string, File[]>} */
    const byFolder = new Map();
    for (const { file, folders } of found) {
      const label = folders.at(-1) ?? "";
      if (!byFolder.has(label)) byFolder.set(label, []);
      byFolder.get(label)?.push(file);
    }
    for (const [label, files] of byFolder) {
      const unused = (/** @type {Column} */ each) => !each.label && !each.photos.length;
      const column =
        this.columns.find((each) => each.label === label) ?? this.columns.find(unused) ?? this.add();
      column.setLabel(label);
      column.read(files);
    }
  }

  /** @returns {string[]} the digests of the examples that are shown */
  shown() {
    return this.columns.flatMap((column) => column.examples.slice(0, SHOWN).map(({ digest }) => digest));
  }

  /** @param {Map<string, string>} reasons why photos cannot be read, by digest */
  markUnreadable(reasons) {
    for (const column of this.columns) {
      for (const photo of column.photos) photo.reason = reasons.get(photo.digest) ?? photo.reason;
      column.refresh();
    }
  }

  /** @returns {NewPhoto[]} */
  unreadable() {
    return this.columns.flatMap((column) => column.photos.filter(({ reason }) => reason));
  }

  dropUnreadable() {
    for (const column of this.columns) {
      column.photos = column.photos.filter(({ reason }) => !reason);
      column.refresh();
    }
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

  /** All photos are taught. */
  taught() {
    for (const column of this.columns) column.photos = [];
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
    /** @type {NewPhoto[]} to be taught */
    this.photos = [];
    /** @type {{digest: string}[]} taught */
    this.examples = [];
    /** @type {number | null} leave-one-out, of the examples */
    this.accuracy = null;
    /** @type {string | null} the label of a class that was taught, which stays */
    this.fixed = label || null;
    this.reading = Promise.resolve();
    this.place = 0;
    this.removable = false;
    this.name = /** @type {HTMLInputElement} */ (
      h("input", { value: displayLabel(label), autocomplete: "off", maxlength: 256, spellcheck: "false" })
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
    takeDrops(this.element, (files, found) => {
      const folder = found.find(({ folders }) => folders.length)?.folders.at(-1);
      if (folder && !this.label) this.setLabel(folder);
      take(files);
    });
    this.refresh();
  }

  get label() {
    return this.fixed ?? this.name.value.trim();
  }

  /** @param {string} label */
  setLabel(label) {
    if (this.fixed !== null) return;
    this.name.value = label;
    this.#describe();
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
    const label = displayLabel(this.label) || `class ${this.place}`;
    this.ways.setAttribute("aria-label", `Photos of ${label}`);
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
        else this.photos.push({ digest, file, reason: file.size ? undefined : "The file is empty." });
        this.refresh();
      }
    });
  }

  /** @param {string} digest */
  #whyNot(digest) {
    const here = [...this.photos, ...this.examples].some((each) => each.digest === digest);
    if (here) return "is in this class already.";
    const other = this.board.several ? null : this.board.holder(digest, this);
    const label = displayLabel(other?.label ?? "") || "another class";
    return other ? `is in ${label} too: a photo has one class.` : "";
  }

  refresh() {
    const shown = this.examples.slice(0, SHOWN);
    const more = this.examples.length - shown.length;
    this.name.readOnly = this.examples.length > 0;
    if (this.examples.length && this.fixed === null) {
      this.fixed = this.label;
      this.name.value = displayLabel(this.fixed);
    }
    this.drop.hidden = !this.removable || this.examples.length > 0;
    this.tiles.replaceChildren(
      ...shown.map(({ digest }) => this.#tile(digest)),
      ...(more ? [h("li", { class: "hint more" }, `and ${more.toLocaleString("en")} more`)] : []),
      ...this.photos.map((photo) => this.#tile(photo.digest, photo)),
    );
    const [old, fresh] = [this.examples.length, this.photos.length];
    const both = `${old.toLocaleString("en")} taught, ${fresh} new`;
    const one = old + fresh ? plural(old + fresh, "photo") : "";
    const right = old && this.accuracy !== null ? `, ${percent(this.accuracy)} right` : "";
    this.count.textContent = (old && fresh ? both : one) + right;
    this.invitation.hidden = old + fresh > 0;
  }

  /**
   * @param {string} digest
   * @param {NewPhoto} [fresh] of a photo that is not taught yet
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
    const name = h("span", { class: "photo-name", "aria-hidden": "true" }, nameOf(digest));
    const why = fresh?.reason && h("span", { class: "photo-problem" }, fresh.reason);
    return h(
      "li",
      { "data-fresh": Boolean(fresh), "data-unreadable": Boolean(fresh?.reason) },
      thumbnail(digest),
      why || name,
      button,
    );
  }
}
