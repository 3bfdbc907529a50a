// @ts-check
/** Renders a task's answer for a photo. */

import { byId, displayLabel, h, percent, plural } from "./ui.js";

/**
 * @typedef {{version: number | null, predictions?: {label: string, score: number}[],
 *   values?: number[], embedding?: number[], error?: string, in_distribution?: boolean,
 *   attention?: import("./heatmap.js").Attention}} Answer
 */

const EMBEDDING_SHOWN = 6;
const TIP = "distribution-tip";
const EXPLANATION =
  "Out of distribution: this image does not look like the images this task was trained on. The answer may still be right; check it " +
  "before you rely on it.";
const GAP = 6; // pixels between a badge and its explanation

/**
 * Render an answer by its type.
 * @param {Answer} found
 */
export function renderAnswer(found) {
  const badge = found.in_distribution === false ? [h("p", { class: "distribution" }, distributionBadge())] : [];
  return [...badge, ...content(found)];
}

/**
 * A badge for an answer out of distribution, explained on hover, focus and click.
 * @param {string} [text]
 */
export function distributionBadge(text = "Out of distribution") {
  const button = h("button", { type: "button", class: "badge", "aria-describedby": TIP }, text);
  const show = () => showTip(button);
  const hide = () => tip().hidePopover();
  for (const event of ["mouseenter", "focus", "click"]) button.addEventListener(event, show);
  for (const event of ["mouseleave", "blur"]) button.addEventListener(event, hide);
  tip(); // so that the description exists
  return button;
}

/** The explanation, one for all badges: in the top layer, where no scroll area cuts it off. */
function tip() {
  const made = document.getElementById(TIP);
  if (made) return made;
  const box = h("div", { id: TIP, class: "tip", role: "tooltip", popover: "auto" }, EXPLANATION);
  byId("main").append(box);
  return box;
}

/** @param {HTMLElement} button */
function showTip(button) {
  const box = tip();
  box.showPopover();
  const [from, own] = [button.getBoundingClientRect(), box.getBoundingClientRect()];
  const below = from.bottom + GAP + own.height < window.innerHeight;
  const top = below ? from.bottom + GAP : from.top - GAP - own.height;
  const left = Math.min(from.left, window.innerWidth - own.width - 2 * GAP);
  box.style.setProperty("top", `${Math.max(GAP, top)}px`);
  box.style.setProperty("left", `${Math.max(GAP, left)}px`);
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
    h("span", { class: "label", title: label }, displayLabel(label)),
    h("span", { class: "score" }, percent(score)),
    h("span", { class: "bar", "aria-hidden": "true" }, fill),
  );
}
