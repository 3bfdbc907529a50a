// @ts-check
/** How good a taught task is: its accuracy, its confusions, and the photos behind them. */

import { nameOf, thumbnail } from "./photos.js";
import { busy, displayLabel, h, percent, plural } from "./ui.js";

/**
 * @typedef {import("./examples.js").Taught} Taught
 * @typedef {import("./examples.js").Example} Example
 * @typedef {{digest: string, labels: string[], suggested: string[]}} Suspect
 * @typedef {{show: (digests: string[]) => void, move: (doubt: Suspect) => Promise<void>,
 *   remove: (digest: string) => Promise<void>}} Actions
 *   show: fetch the pictures of these examples; move: to the suggested labels
 */

const MATRIX_CLASSES = 12; // of more, the confusions are listed
const LISTED = 15;
const HINT = "Rows are classes, columns are predictions by a model trained on all other photos.";

/**
 * @param {string} task
 * @param {Taught} found
 */
export function summary(task, found) {
  return h(
    "section",
    { class: "panel version", "aria-labelledby": "taught-title" },
    h(
      "header",
      {},
      h("h2", { id: "taught-title" }, task),
      h("span", { class: "tag" }, `version ${found.version}`),
      h("span", { class: "badge", "data-state": "ready" }, "Served"),
    ),
    ...accuracy(found),
    h("p", {}, h("a", { href: `#tasks/${encodeURIComponent(task)}` }, "Versions and history")),
  );
}

/** @param {Taught} found */
function accuracy({ leave_one_out: judged, total }) {
  if (!judged) return [h("p", {}, "Add a second photo to a class to see the accuracy.")];
  const alone = total - judged.images;
  const uncounted = alone
    ? ` ${plural(alone, "photo is the only one of its class", "photos are the only ones of their classes")} and not counted.`
    : "";
  return [
    h(
      "p",
      { class: "headline" },
      h("strong", {}, percent(judged.accuracy)),
      ` leave-one-out accuracy: ${judged.correct.toLocaleString("en")} of ${plural(judged.images, "photo")} right`,
    ),
    h(
      "p",
      { class: "hint" },
      "Each photo is classified by a model trained on all others. On similar new photos, expect " +
        `${whole(judged.low)} to ${whole(judged.high)} % (95 % interval); more photos narrow it.${uncounted}`,
    ),
  ];
}

/** @param {number} share */
function whole(share) {
  return Math.round(100 * share);
}

/**
 * Suspected label errors, or nothing.
 * @param {Taught} found
 * @param {Actions} actions
 */
export function labelIssues(found, actions) {
  if (!found.label_issues.length) return [];
  const section = h(
    "section",
    { class: "panel", "aria-labelledby": "label-issues-title" },
    h("h2", { id: "label-issues-title" }, "Suspected label errors"),
    suspects(found.label_issues, actions),
  );
  return [section];
}

/**
 * What is taken for what, with the photos behind each count; nothing for multi-label tasks.
 * @param {Taught} found
 * @param {Actions} actions
 */
export function confusions(found, actions) {
  const judged = found.examples.filter((each) => each.predicted?.length === 1);
  if (found.task_type !== "single_label" || !judged.length) return [];
  /** @type {Map<string, Example[]>} */
  const cells = new Map();
  for (const each of judged) {
    const cell = key(each.labels[0], each.predicted?.[0] ?? "");
    if (!cells.has(cell)) cells.set(cell, []);
    cells.get(cell)?.push(each);
  }
  const place = h("div", { class: "cell-photos", id: "cell-photos" });
  const open = opener(place, actions);
  const small = found.classes.length <= MATRIX_CLASSES;
  const section = h(
    "section",
    { class: "panel", "aria-labelledby": "confusions-title" },
    h("h2", { id: "confusions-title" }, small ? "Confusion matrix" : "Most frequent confusions"),
    h("p", { class: "hint" }, small ? HINT : "", ` Choose ${small ? "a number" : "one"} to see the photos.`),
    small ? matrix(found, cells, open) : list(cells, open),
    place,
  );
  return [section];
}

/**
 * @param {string} label
 * @param {string} predicted
 */
function key(label, predicted) {
  return JSON.stringify([label, predicted]);
}

/**
 * @typedef {(button: HTMLElement, label: string, predicted: string, examples: Example[]) => void} Open
 * @param {HTMLElement} place
 * @param {Actions} actions
 * @returns {Open}
 */
function opener(place, actions) {
  return (button, label, predicted, examples) => {
    const wasOpen = button.getAttribute("aria-expanded") === "true";
    for (const other of place.parentElement?.querySelectorAll("[aria-expanded]") ?? [])
      other.setAttribute("aria-expanded", "false");
    place.replaceChildren();
    if (wasOpen) return;
    button.setAttribute("aria-expanded", "true");
    const right = label === predicted;
    const what = right ? "predicted right" : `predicted ${displayLabel(predicted)}`;
    place.append(h("h3", {}, `${plural(examples.length, "photo")} of ${displayLabel(label)}, ${what}`));
    if (right) place.append(gallery(examples));
    else place.append(suspects(examples.map((each) => ({ ...each, suggested: [predicted] })), actions));
    actions.show(examples.map(({ digest }) => digest));
  };
}

/**
 * @param {Taught} found
 * @param {Map<string, Example[]>} cells
 * @param {Open} open
 */
function matrix(found, cells, open) {
  const labels = found.classes.map(({ label }) => label);
  const cell = (/** @type {string} */ label, /** @type {string} */ predicted) => {
    const examples = cells.get(key(label, predicted)) ?? [];
    const kind = label === predicted ? "right" : "wrong";
    if (!examples.length) return h("td", {});
    const said = `${examples.length}: ${displayLabel(label)} predicted as ${displayLabel(predicted)}`;
    const button = cellButton(String(examples.length), said);
    button.addEventListener("click", () => open(button, label, predicted, examples));
    return h("td", { "data-kind": kind }, button);
  };
  const rows = found.classes.map(({ label, accuracy: share }) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, displayLabel(label)),
      ...labels.map((predicted) => cell(label, predicted)),
      h("td", { class: "share" }, share === null ? "–" : percent(share)),
    ),
  );
  const heads = labels.map((label) => h("th", { scope: "col" }, h("span", {}, displayLabel(label))));
  return h(
    "div",
    { class: "matrix-frame" },
    h(
      "table",
      { class: "matrix" },
      h("caption", { class: "unseen" }, "Predictions of photos by class"),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Class"), ...heads, h("th", { scope: "col" }, "Right"))),
      h("tbody", {}, ...rows),
    ),
  );
}

/**
 * @param {string} text
 * @param {string} said
 */
function cellButton(text, said) {
  const attributes = { type: "button", class: "cell", "aria-expanded": "false", "aria-controls": "cell-photos" };
  return h("button", { ...attributes, "aria-label": said }, text);
}

/**
 * The most frequent confusions, for tasks of many classes.
 * @param {Map<string, Example[]>} cells
 * @param {Open} open
 */
function list(cells, open) {
  const wrong = [...cells]
    .map(([cell, examples]) => ({ pair: /** @type {string[]} */ (JSON.parse(cell)), examples }))
    .filter(({ pair: [label, predicted] }) => label !== predicted)
    .sort((one, other) => other.examples.length - one.examples.length);
  if (!wrong.length) return h("p", {}, "Every photo is predicted right.");
  const entries = wrong.slice(0, LISTED).map(({ pair: [label, predicted], examples }) => {
    const said = `${plural(examples.length, "photo")}: ${displayLabel(label)} → ${displayLabel(predicted)}`;
    const button = cellButton(said, said);
    button.addEventListener("click", () => open(button, label, predicted, examples));
    return h("li", {}, button);
  });
  return h("ul", { class: "confusions" }, ...entries);
}

/** @param {Example[]} examples */
function gallery(examples) {
  const tile = (/** @type {Example} */ { digest }) =>
    h(
      "li",
      {},
      thumbnail(digest),
      h("span", { class: "photo-name", "aria-hidden": "true" }, nameOf(digest)),
    );
  return h("ul", { class: "photos" }, ...examples.map(tile));
}

/**
 * Photos that may be in the wrong class, each with what can be done.
 * @param {Suspect[]} photos
 * @param {Actions} actions
 */
function suspects(photos, actions) {
  const entry = (/** @type {Suspect} */ each, /** @type {number} */ at) => {
    const { digest, labels, suggested } = each;
    const name = nameOf(digest);
    const move = `Move to ${named(suggested)}`;
    return h(
      "li",
      {},
      thumbnail(digest),
      h(
        "div",
        {},
        h("p", { class: "photo-title" }, name),
        h("p", {}, "In ", h("b", {}, named(labels)), ", looks like ", h("b", {}, named(suggested))),
        h(
          "div",
          { class: "actions" },
          action(move, `${move}: ${name}`, () => actions.move(each), at),
          action("Remove", `Remove ${name}`, () => actions.remove(digest), at),
        ),
      ),
    );
  };
  return h("ul", { class: "label-issues" }, ...photos.map(entry));
}

/** @param {string[]} labels */
export function named(labels) {
  return labels.map(displayLabel).join(" and ") || "nothing";
}

/**
 * @param {string} text
 * @param {string} label what a screen reader says; it starts with the text
 * @param {() => Promise<void>} run
 * @param {number} at its position in the list
 */
function action(text, label, run, at) {
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: "quiet", "aria-label": label }, text)
  );
  button.addEventListener("click", async () => {
    await busy(button, run);
    goOnAt(at);
  });
  return button;
}

/**
 * The list was rendered again and lost the focus: move it to the entry at this position, or to what
 * comes next.
 * @param {number} at
 */
function goOnAt(at) {
  if (document.activeElement !== document.body) return;
  const left = document.querySelectorAll(".label-issues li");
  const next = left[Math.min(at, left.length - 1)] ?? document.querySelector("#trial:not([hidden])");
  const place = next?.querySelector("button") ?? document.getElementById("teach");
  /** @type {HTMLElement | null} */ (place)?.focus();
}
