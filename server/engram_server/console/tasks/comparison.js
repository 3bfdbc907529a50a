// @ts-check
/** How other versions answer the images that the task has answered, and their promotion. */

import { rememberExample, thumbnail } from "../photos.js";
import { ask, displayLabel, h, percent, plural } from "../ui.js";

const CLASSES = 5; // with the lowest agreement
const IMAGES = 10; // that the versions disagree on

/**
 * @param {any} task
 * @param {any} comparison
 * @param {(source: string, body: any) => Promise<void>} promote
 * @param {(text: string, run: () => Promise<void>, kind?: string) => HTMLElement} button
 */
export function comparisonPanel(task, comparison, promote, button) {
  const shadow = task.aliases.shadow;
  const waits = shadow !== undefined && shadow !== task.aliases.default;
  const pairs = [...comparison.pairs].reverse();
  if (!pairs.length && !waits) return null;
  return h(
    "section",
    { class: "panel comparison" },
    h("h2", {}, "Compared versions"),
    !pairs.length &&
      h("p", {}, `Version ${shadow} is the shadow. Nothing was compared yet: send images to the task.`),
    ...pairs.map((pair) => pairDetails(task, pair, promote, button)),
  );
}

/**
 * @param {any} task
 * @param {any} pair
 * @param {(source: string, body: any) => Promise<void>} promote
 * @param {(text: string, run: () => Promise<void>, kind?: string) => HTMLElement} button
 */
function pairDetails(task, pair, promote, button) {
  const aliases = Object.keys(task.aliases).filter(
    (alias) => alias !== "default" && task.aliases[alias] === pair.candidate,
  );
  const promotable = aliases.length && pair.baseline === task.aliases.default;
  const classes = pair.classes.slice(0, CLASSES);
  const images = (pair.disagreements ?? []).slice(0, IMAGES);
  for (const { digest, thumbnail: address } of images) {
    if (address) rememberExample({ digest, name: null, thumbnail: address });
  }
  return h(
    "div",
    { class: "pair", "data-candidate": pair.candidate },
    h("h3", {}, `Version ${pair.candidate} beside version ${pair.baseline}`),
    h("p", { class: "agreement" }, ...agreement(pair)),
    pair.feedback && h("p", { class: "feedback" }, feedback(pair.feedback)),
    pair.dropped > 0 &&
      h("p", { class: "hint" }, `Left out under load on ${plural(pair.dropped, "image")}.`),
    classes.length > 1 &&
      table(
        "Lowest agreement",
        ["Class", "Images", "Agreement"],
        classes.map((/** @type {any} */ each) => [displayLabel(each.label), each.images, percent(each.agreement)]),
      ),
    images.length > 0 &&
      table(
        "Last disagreements",
        ["Image", `Version ${pair.baseline}`, `Version ${pair.candidate}`],
        images.map((/** @type {any} */ each) => [
          each.thumbnail
            ? thumbnail(each.digest)
            : h("code", { title: each.digest }, each.digest.replace("sha256:", "").slice(0, 12)),
          `${displayLabel(each.baseline)} ${percent(each.baseline_score)}`,
          `${displayLabel(each.candidate)} ${percent(each.candidate_score)}`,
        ]),
      ),
    promotable &&
      h(
        "div",
        { class: "actions" },
        button("Promote…", () => choose(pair, aliases[0], promote), "primary"),
      ),
  );
}

/** @param {any} pair */
function agreement(pair) {
  if (pair.agreement === null) return ["No image was answered by both."];
  const rest = ` agreement on ${plural(pair.images, "image")}`;
  const difference = `; scores differ by ${percent(pair.mean_score_difference)} on average.`;
  return [h("strong", {}, percent(pair.agreement)), rest + difference];
}

/** @param {any} gain */
function feedback(gain) {
  const points = (/** @type {number} */ share) => `${share < 0 ? "−" : "+"}${Math.abs(100 * share).toFixed(1)}`;
  const range = `${points(gain.low)} to ${points(gain.high)}`;
  return `Feedback on ${plural(gain.images, "image")}: ${percent(gain.candidate_accuracy)} right instead of ${percent(gain.baseline_accuracy)}, ${points(gain.gain)} points (95 % interval ${range}).`;
}

/**
 * @param {string} caption
 * @param {string[]} head
 * @param {(Node | string | number)[][]} rows
 */
function table(caption, head, rows) {
  return h(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": caption },
    h(
      "table",
      {},
      h("caption", {}, caption),
      h("thead", {}, h("tr", {}, ...head.map((each) => h("th", { scope: "col" }, each)))),
      h(
        "tbody",
        {},
        ...rows.map((row) => h("tr", {}, ...row.map((each) => h("td", {}, each)))),
      ),
    ),
  );
}

/**
 * Ask for what the evidence must show, and promote if it does.
 * @param {any} pair
 * @param {string} source
 * @param {(source: string, body: any) => Promise<void>} promote
 */
async function choose(pair, source, promote) {
  const share = number("min_agreement", 0.97, { min: 0, max: 1, step: "any" });
  const images = number("min_images", 1000, { min: 1, step: 1 });
  const body = await ask({
    title: `Make version ${pair.candidate} the default?`,
    body: [
      h("p", {}, "The server checks the evidence of all replicas, and writes it into the history."),
      h("label", {}, "Agreement of at least", share),
      h("label", {}, "on at least this many images", images),
    ],
    confirm: "Promote",
    read: () => ({ min_agreement: share.valueAsNumber, min_images: images.valueAsNumber }),
  });
  if (body) await promote(source, body);
}

/**
 * @param {string} name
 * @param {number} value
 * @param {Record<string, any>} limits
 */
function number(name, value, limits) {
  const input = h("input", { type: "number", name, value, required: true, ...limits });
  return /** @type {HTMLInputElement} */ (input);
}
