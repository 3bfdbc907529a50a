// @ts-check
/** Renders a task's answer for a photo. */

import { h, percent, plural } from "./ui.js";

/**
 * @typedef {{version: number | null, predictions?: {label: string, score: number}[],
 *   values?: number[], embedding?: number[], error?: string, in_distribution?: boolean,
 *   attention?: import("./heatmap.js").Attention}} Answer
 */

const EMBEDDING_SHOWN = 6;
export const OUT_OF_DISTRIBUTION = "out of distribution";

/**
 * Render an answer by its type.
 * @param {Answer} found
 */
export function renderAnswer(found) {
  const limits =
    found.in_distribution === false
      ? [h("p", { class: "unknown" }, "Out of distribution. This task was not trained on images like this one.")]
      : [];
  return [...limits, ...content(found)];
}

/** @param {Answer} found */
function content(found) {
  if (found.error) return [h("p", { class: "hint" }, `No answer: ${found.error}.`)];
  if (found.predictions?.length) return [h("ol", { class: "bars" }, ...found.predictions.map(bar))];
  if (found.predictions) return [h("p", { class: "hint" }, "No label reaches the threshold.")];
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
