// @ts-check
/** All class names of a task, with a search. */

import { displayLabel, h, plural } from "../ui.js";

const SHOWN = 200;
const SEARCHED = 20; // from this many classes on there is a search field

/** @param {string[]} labels */
export function classes(labels) {
  const names = labels.map(displayLabel);
  const list = h("p", { class: "classes" });
  const count = h("p", { class: "hint", role: "status" });
  const search = /** @type {HTMLInputElement} */ (
    h("input", { type: "search", name: "class", autocomplete: "off", spellcheck: "false" })
  );
  const show = () => {
    const text = search.value.trim().toLowerCase();
    const found = names.filter((name) => name.toLowerCase().includes(text));
    const shown = found.slice(0, SHOWN);
    list.textContent = shown.join(", ");
    const all = found.length === shown.length ? "" : `; the first ${SHOWN} are shown`;
    count.textContent = text || all ? `${plural(found.length, "class", "classes")} found${all}.` : "";
  };
  search.addEventListener("input", show);
  show();
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, plural(labels.length, "class", "classes")),
    names.length >= SEARCHED && h("label", {}, "Search the classes", search),
    count,
    list,
  );
}
