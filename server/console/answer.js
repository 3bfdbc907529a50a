// @ts-check
/** What a task said of a photo. */

import { h, percent, plural } from "./ui.js";

/**
 * @typedef {{version: number | null, predictions?: {label: string, score: number}[],
 *   values?: number[], embedding?: number[], error?: string, known?: boolean,
 *   attention?: import("./heatmap.js").Attention}} Answer
 */

const EMBEDDING_SHOWN = 6;
export const UNKNOWN = "unlike anything this task was taught";

/**
 * What a task said, by the kind of its answer.
 * @param {Answer} found
 */
export function said(found) {
  const limits =
    found.known === false
      ? [h("p", { class: "unknown" }, `This photo is ${UNKNOWN}: its answer means little.`)]
      : [];
  return [...limits, ...content(found)];
}

/** @param {Answer} found */
function content(found) {
  if (found.error) return [h("p", { class: "hint" }, `No answer: ${found.error}.`)];
  if (found.predictions?.length) return [h("ol", { class: "bars" }, ...found.predictions.map(bar))];
  if (found.predictions) return [h("p", { class: "hint" }, "No label is likely enough.")];
  const numbers = found.values ?? found.embedding ?? [];
  const shown = numbers.slice(0, EMBEDDING_SHOWN).map((value) => value.toPrecision(4));
  const more = numbers.length > shown.length ? ` … ${numbers.length - shown.length} more` : "";
  const kind = found.values
    ? plural(numbers.length, "value")
    : `an embedding of ${plural(numbers.length, "number")}`;
  return [h("p", { class: "numbers" }, shown.join("  ") + more), h("p", { class: "hint" }, kind)];
}

/** @param {{label: string, score: number}} prediction */
function bar({ label, score }) {
  const fill = h("span", { class: "fill" });
  fill.style.setProperty("--score", String(score));
  return h(
    "li",
    {},
    h("span", { class: "label", title: label }, label.replaceAll("_", " ")),
    h("span", { class: "score" }, percent(score)),
    h("span", { class: "bar", "aria-hidden": "true" }, fill),
  );
}
