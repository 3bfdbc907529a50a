// @ts-check
/** The choice of tasks: a combobox with suggestions, and a chip for each chosen task. */

import { json } from "../api.js";
import { debounced, h } from "../ui.js";

const SUGGESTED = 8;
const LIST = "task-suggestions";

/** @typedef {{ref: string, about: string}} Suggestion */

export class TaskPicker {
  /** @type {string[]} */
  #chosen = [];
  /** @type {Suggestion[]} */
  #suggestions = [];
  /** The position of the marked suggestion; -1 for none. */
  #marked = -1;
  /** Number of the latest lookup; older ones are ignored. */
  #turn = 0;
  #chips = h("ul", { class: "chips", "aria-label": "Chosen tasks" });
  #list = h("ul", { class: "suggestions", id: LIST, role: "listbox", "aria-label": "Tasks", hidden: true });
  #input;

  /**
   * @param {HTMLInputElement} input
   * @param {() => void} changed the chosen tasks
   */
  constructor(input, changed) {
    this.#input = input;
    this.changed = changed;
    for (const [name, value] of Object.entries({
      role: "combobox",
      "aria-expanded": "false",
      "aria-controls": LIST,
      "aria-autocomplete": "list",
    })) {
      input.setAttribute(name, value);
    }
    input.before(this.#chips);
    input.after(this.#list);
    const look = debounced(() => this.#look());
    input.addEventListener("input", () => {
      if (input.value.includes(",")) this.#commit();
      else look();
    });
    input.addEventListener("click", () => this.#look());
    input.addEventListener("blur", () => this.close());
    input.addEventListener("keydown", (event) => this.#onKey(event));
  }

  /** The chosen tasks, and those that are typed but not yet chips. */
  get refs() {
    return [...new Set([...this.#chosen, ...split(this.#input.value)])];
  }

  set refs(refs) {
    this.#input.value = "";
    this.#chosen = [...refs];
    this.#showChips();
  }

  /** Turn what is typed into chips. */
  #commit() {
    this.refs = this.refs;
    this.close();
  }

  /** @param {string} ref */
  #add(ref) {
    this.#input.value = "";
    this.refs = [...new Set([...this.#chosen, ref])];
    this.close();
    this.changed();
  }

  /** @param {string} ref */
  #remove(ref) {
    this.#chosen = this.#chosen.filter((each) => each !== ref);
    this.#showChips();
    this.#input.focus();
    this.changed();
  }

  #showChips() {
    this.#chips.replaceChildren(
      ...this.#chosen.map((ref) =>
        h(
          "li",
          { class: "chip" },
          ref,
          h("button", { type: "button", "aria-label": `Remove ${ref}`, onclick: () => this.#remove(ref) }, "×"),
        ),
      ),
    );
    this.#input.placeholder = this.#chosen.length ? "another task" : "every ready task";
  }

  /** @param {KeyboardEvent} event */
  #onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) {
      event.preventDefault();
      if (this.#list.hidden) this.#look();
      else this.#mark((this.#marked + step + this.#suggestions.length) % this.#suggestions.length);
    } else if (event.key === "Enter" && this.#marked >= 0) {
      event.preventDefault();
      this.#add(this.#suggestions[this.#marked].ref);
    } else if (event.key === "Enter") {
      this.#commit(); // and the form is submitted
    } else if (event.key === "Escape") {
      this.close();
    } else if (event.key === "Backspace" && !this.#input.value && this.#chosen.length) {
      this.#remove(this.#chosen[this.#chosen.length - 1]);
    }
  }

  /** @param {number} position */
  #mark(position) {
    this.#marked = position;
    const options = [...this.#list.children];
    for (const [place, option] of options.entries()) {
      option.setAttribute("aria-selected", String(place === position));
    }
    const option = options[position];
    if (option) this.#input.setAttribute("aria-activedescendant", option.id);
    else this.#input.removeAttribute("aria-activedescendant");
    option?.scrollIntoView({ block: "nearest" });
  }

  /** Look for suggestions and show them. */
  async #look() {
    const turn = ++this.#turn;
    const found = await suggestions(this.#input.value.trim()).catch(() => []);
    if (turn !== this.#turn || document.activeElement !== this.#input) return;
    this.#suggestions = found.filter(({ ref }) => !this.#chosen.includes(ref));
    this.#list.replaceChildren(...this.#suggestions.map((each, place) => this.#option(each, place)));
    this.#open(this.#suggestions.length > 0);
    this.#mark(-1);
  }

  /**
   * @param {Suggestion} suggestion
   * @param {number} place
   */
  #option({ ref, about }, place) {
    const option = h(
      "li",
      { role: "option", id: `${LIST}-${place}`, "aria-selected": "false" },
      h("span", { class: "name" }, ref),
      h("span", { class: "hint" }, about),
    );
    option.addEventListener("mousedown", (event) => {
      event.preventDefault(); // the focus stays in the field
      this.#add(ref);
    });
    return option;
  }

  /** @param {boolean} open */
  #open(open) {
    this.#list.hidden = !open;
    this.#input.setAttribute("aria-expanded", String(open));
  }

  /** Hide the suggestions. */
  close() {
    this.#turn++;
    this.#open(false);
    this.#mark(-1);
  }
}

/** @param {string} text */
function split(text) {
  return text
    .split(",")
    .map((ref) => ref.trim())
    .filter(Boolean);
}

/**
 * Tasks whose name or description contains the text; versions after `@` and aliases after `:`.
 * @param {string} text
 * @returns {Promise<Suggestion[]>}
 */
async function suggestions(text) {
  const [, name, mark, rest] = /^([^@:]*)([@:]?)(.*)$/.exec(text) ?? [];
  const { tasks } = await json(`tasks?${new URLSearchParams({ q: name, limit: String(SUGGESTED) })}`);
  if (!mark) {
    return tasks.map((/** @type {any} */ each) => ({ ref: each.task, about: each.description }));
  }
  const task = tasks.find((/** @type {any} */ each) => each.task === name);
  if (!task) return [];
  const targets =
    mark === "@"
      ? [...task.versions].reverse().map((version) => [version, `version ${version}`])
      : Object.entries(task.aliases).map(([alias, version]) => [alias, `version ${version}`]);
  return targets
    .filter(([target]) => String(target).startsWith(rest))
    .slice(0, SUGGESTED)
    .map(([target, about]) => ({ ref: `${name}${mark}${target}`, about: String(about) }));
}
