// @ts-check
/** The corrections that a trained task received, each with a button that removes it. */

import { json, taskPath } from "../api.js";
import { thumbnail } from "../photos.js";
import { busy, displayLabel, errorBox, h, plural, time } from "../ui.js";

const PAGE = 20; // records, one per request that sent corrections

/**
 * A panel of corrections; null if there are none.
 * @param {string} task
 */
export async function corrections(task) {
  const read = (/** @type {number} */ offset) =>
    json(taskPath(task, `corrections?limit=${PAGE}&offset=${offset}`));
  const first = await read(0).catch(() => null);
  if (!first?.records) return null;
  const list = h("ul", { class: "corrections" });
  const more = /** @type {HTMLButtonElement} */ (h("button", { type: "button" }, "Show earlier corrections"));
  let offset = 0;
  const show = (/** @type {any} */ page) => {
    list.append(...page.corrections.map((/** @type {any} */ each) => item(task, each)));
    offset += PAGE;
    more.hidden = offset >= page.records;
  };
  more.addEventListener("click", () => busy(more, async () => show(await read(offset))));
  show(first);
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, `Corrections received (${first.records.toLocaleString("en")})`),
    h("p", { class: "hint" }, "Newest first. They are stored for the next training of this task."),
    list,
    more,
  );
}

/**
 * @param {string} task
 * @param {any} correction
 */
function item(task, { digest, labels, version, time: when, actor }) {
  const what = labels.map(displayLabel).join(", ");
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", "aria-label": `Remove the correction to ${what || "no class"}` }, "Remove")
  );
  const element = h(
    "li",
    {},
    thumbnail(digest),
    h(
      "div",
      { class: "grow" },
      h("p", {}, h("b", {}, what || "None of its classes")),
      h("p", { class: "hint" }, time(when), ` by ${actor}, version ${version}`),
    ),
    button,
  );
  button.addEventListener("click", () =>
    busy(button, async () => {
      try {
        const path = taskPath(task, `corrections?digest=${encodeURIComponent(digest)}`);
        const { removed } = await json(path, { method: "DELETE" });
        element.replaceChildren(h("p", { class: "hint", role: "status" }, `${plural(removed, "correction")} removed.`));
      } catch (error) {
        element.append(errorBox(error));
      }
    }),
  );
  return element;
}
