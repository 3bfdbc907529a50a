// @ts-check
/** Small pieces every page uses. Text is only ever set as text, never as markup. */

import { Problem } from "./api.js";

/** Phones. */
export const NARROW = window.matchMedia("(max-width: 560px)");

/**
 * An element. `on…` attributes are listeners; `false` and `null` leave an attribute out.
 * @param {string} tag
 * @param {Record<string, any>} [attributes]
 * @param {...(Node | string | number | null | undefined | false)} children
 * @returns {HTMLElement}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === false || child === null || child === undefined) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/**
 * @template {HTMLElement} [T=HTMLElement]
 * @param {string} id
 * @returns {T}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`the page has no element '${id}'`);
  return /** @type {T} */ (found);
}

/**
 * An error message. Anything but a Problem is a bug of this page.
 * @param {unknown} error
 */
export function errorBox(error) {
  const [title, detail, requestId] =
    error instanceof Problem
      ? [error.title, error.detail, error.requestId]
      : ["Something went wrong in this page", String(error), ""];
  return h(
    "div",
    { class: "problem", role: "alert" },
    h("p", { class: "problem-title" }, title),
    h("p", {}, detail),
    requestId && h("p", { class: "hint" }, "Request ", h("code", {}, requestId)),
  );
}

/**
 * A line that goes away by itself; with an action, a button in it.
 * @param {string} text
 * @param {{label: string, run: () => void}} [action]
 */
export function note(text, action) {
  const close = () => box.remove();
  const box = h("div", { class: "note" }, h("span", {}, text));
  if (action) {
    const run = () => {
      close();
      action.run();
    };
    box.append(h("button", { type: "button", class: "quiet", onclick: run }, action.label));
  }
  box.append(
    h("button", { type: "button", class: "quiet", "aria-label": "Close", onclick: close }, "×"),
  );
  byId("notes").append(box);
  setTimeout(close, action ? 12000 : 6000);
}

/**
 * Show a confirmation dialog. Resolve to the result of `read` when confirmed, else to null.
 * @template T
 * @param {{title: string, body: (Node | string)[], confirm: string, danger?: boolean, read: () => T,
 *   also?: {label: string, run: () => void}}} options
 * @returns {Promise<T | null>}
 */
export function ask({ title, body, confirm, danger, read, also }) {
  return new Promise((resolve) => {
    const heading = h("h2", { id: "dialog-title" }, title);
    const dialog = /** @type {HTMLDialogElement} */ (
      h("dialog", { "aria-labelledby": "dialog-title" })
    );
    const cancel = () => dialog.close();
    const form = h(
      "form",
      { method: "dialog" },
      heading,
      ...body,
      h(
        "div",
        { class: "actions" },
        h("button", { class: danger ? "danger" : "primary", value: "yes" }, confirm),
        h("button", { type: "button", onclick: cancel }, "Cancel"),
        also &&
          h(
            "button",
            {
              type: "button",
              class: "quiet",
              onclick: () => {
                also.run();
                cancel();
              },
            },
            also.label,
          ),
      ),
    );
    dialog.append(form);
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes" ? read() : null);
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * Run something a button started, with the button out of use meanwhile. The focus stays on it.
 * @param {HTMLButtonElement} button
 * @param {() => Promise<void>} work
 */
export async function busy(button, work) {
  const focused = document.activeElement === button;
  button.disabled = true;
  try {
    await work();
  } finally {
    button.disabled = false;
    const lost = document.activeElement === document.body || document.activeElement === null;
    if (focused && lost) button.focus({ preventScroll: true });
  }
}

/**
 * Run something once the calls for it have paused.
 * @template {any[]} T
 * @param {(...values: T) => void} run
 * @param {number} [pause] in milliseconds
 */
export function debounced(run, pause = 150) {
  let timer = 0;
  return (/** @type {T} */ ...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => run(...values), pause);
  };
}

/**
 * Buttons to the page before and the page after, and what this one shows.
 * @param {{first: number, shown: number, total: number, back: () => void, forward: () => void}} page
 *   first: the number of the first item, from 1
 */
export function pager({ first, shown, total, back, forward }) {
  if (shown >= total) return null;
  const last = first + shown - 1;
  const range = `${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
  return h(
    "nav",
    { class: "pager", "aria-label": "Pages of the list" },
    h("button", { type: "button", disabled: first <= 1, onclick: back }, "Previous"),
    h("span", { class: "hint" }, `${range} of ${total.toLocaleString("en")}`),
    h("button", { type: "button", disabled: last >= total, onclick: forward }, "Next"),
  );
}

/**
 * A choice from a list.
 * @param {string} label
 * @param {[value: string, text: string][]} options
 * @param {string} value
 * @param {(value: string) => void} choose
 */
export function choice(label, options, value, choose) {
  const select = /** @type {HTMLSelectElement} */ (
    h(
      "select",
      { name: label.toLowerCase() },
      ...options.map(([each, text]) => h("option", { value: each, selected: each === value }, text)),
    )
  );
  select.addEventListener("change", () => choose(select.value));
  return h("label", {}, label, select);
}

/**
 * The first items of a list, and a button for the next ones. Hidden items cost nothing.
 * @template T
 * @param {string} what the items, in the plural
 * @param {T[]} items
 * @param {number} step
 * @param {(item: T) => Node} render
 * @param {HTMLElement} list
 */
export function inSteps(what, items, step, render, list) {
  let shown = 0;
  const more = h("button", { type: "button", class: "more", onclick: () => show() });
  const show = () => {
    const next = items.slice(shown, shown + step).map(render);
    list.append(...next);
    shown += next.length;
    const left = items.length - shown;
    more.hidden = left === 0;
    more.textContent = `Show ${Math.min(step, left)} of ${left.toLocaleString("en")} more ${what}`;
    const first = shown > next.length && next[0];
    if (first instanceof HTMLElement) {
      first.tabIndex = -1; // the button may be gone: go on from the first new item
      first.focus({ preventScroll: true });
    }
  };
  show();
  return [list, more];
}

/** @param {number} value between 0 and 1 */
export function percent(value) {
  return `${(value * 100).toFixed(value >= 0.9995 ? 0 : 1)} %`;
}

/**
 * A class label as people write it.
 * @param {string} label
 */
export function displayLabel(label) {
  return label.replaceAll("_", " ");
}

/** @param {number} value */
export function milliseconds(value) {
  return `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;
}

/** @param {number} bytes */
export function size(bytes) {
  const units = ["B", "KB", "MB", "GB"];
  let unit = 0;
  while (bytes >= 1000 && unit < units.length - 1) [bytes, unit] = [bytes / 1000, unit + 1];
  return `${unit && bytes < 100 ? bytes.toFixed(1) : bytes.toFixed(0)} ${units[unit]}`;
}

/**
 * @param {number} count
 * @param {string} one
 * @param {string} [many]
 */
export function plural(count, one, many = `${one}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}

const TIME = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "short" });

/** @param {string} iso */
export function time(iso) {
  return h("time", { datetime: iso, title: iso }, TIME.format(new Date(iso)));
}

/** @type {Record<string, string>} */
const STATES = {
  ready: "Ready",
  failed: "Failed",
  on_demand: "On demand",
  unloaded: "Unloaded",
  retired: "Retired",
};

/**
 * The state of a task or version, in a word and a colour.
 * @param {string} status
 */
export function badge(status) {
  return h("span", { class: "badge", "data-state": status }, STATES[status] ?? status);
}

/**
 * Hand a file to the person.
 * @param {Blob} blob
 * @param {string} name
 */
export function saveAs(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
