// @ts-check
/** The figures that were measured for a version, from its manifest. */

import { h, percent, plural } from "../ui.js";

const SHARES = /accuracy|precision|recall|f1|auroc|top|match|calibration/i; // shares of 1
const HEADLINES = ["accuracy", "mean_average_precision", "r2"]; // the main metric of a version
/** @type {Record<string, string>} The data splits of metrics, the most meaningful first. */
const SPLITS = {
  test: "test",
  val: "validation",
  leave_one_out: "leave-one-out",
  train: "training",
};
const SPLIT = new RegExp(`^(${Object.keys(SPLITS).join("|")})_`);

/**
 * The figure that speaks for the version in a line, and all of them to be unfolded.
 * @param {any} manifest
 */
export function metrics(manifest) {
  /** @type {Record<string, number>} */
  const found = manifest?.metrics ?? {};
  if (!Object.keys(found).length) return null;
  const line = headline(found);
  return h(
    "div",
    { class: "metrics" },
    line && h("p", { class: "headline" }, h("strong", {}, line[0]), ` ${line[1]}`),
    h("details", {}, h("summary", {}, "All figures"), figures(found)),
  );
}

/**
 * As in "66.7 % (63.7 to 69.6) on 1,000 test images": the figure, and the rest of the sentence.
 * @param {Record<string, number>} found
 */
function headline(found) {
  const keys = Object.keys(SPLITS).flatMap((split) => HEADLINES.map((name) => [split, name]));
  const best = keys.find(([split, name]) => `${split}_${name}` in found);
  if (!best) return null;
  const [split, name] = best;
  const what = name === "accuracy" ? "" : `${name.replaceAll("_", " ")} `;
  const images = found[`${split}_images`];
  const on = images ? plural(images, `${SPLITS[split]} image`) : `${SPLITS[split]} images`;
  return [
    what + written(found, `${split}_${name}`),
    `${interval(found, `${split}_${name}`)} on ${on}`.trim(),
  ];
}

/**
 * @param {Record<string, number>} found
 * @param {string} key
 */
function written(found, key) {
  const value = found[key];
  if (SHARES.test(key) && value >= 0 && value <= 1) return percent(value);
  return Number.isInteger(value)
    ? value.toLocaleString("en")
    : String(Number(value.toPrecision(4)));
}

/**
 * The 95 % interval of a share, where the manifest has it.
 * @param {Record<string, number>} found
 * @param {string} key
 */
function interval(found, key) {
  if (!(`${key}_low` in found && `${key}_high` in found)) return "";
  const ends = [found[`${key}_low`], found[`${key}_high`]];
  return `(${ends.map((end) => (100 * end).toFixed(1)).join(" to ")})`;
}

/**
 * One row a figure, one column a split it was measured on; those of no split are in the first.
 * @param {Record<string, number>} found
 */
function figures(found) {
  const keys = Object.keys(found).filter((key) => !/_(low|high)$/.test(key));
  const splits = Object.keys(SPLITS).filter((split) =>
    keys.some((key) => key.startsWith(`${split}_`)),
  );
  const names = new Set(keys.map((key) => key.replace(SPLIT, "")));
  const cell = (/** @type {string} */ key) =>
    h("td", {}, key in found ? `${written(found, key)} ${interval(found, key)}`.trim() : "");
  const rows = [...names].map((name) =>
    h(
      "tr",
      {},
      h("th", { scope: "row" }, name.replaceAll("_", " ")),
      ...(name in found ? [name] : splits.map((split) => `${split}_${name}`)).map(cell),
    ),
  );
  const columns = splits.map((each) => h("th", { scope: "col" }, SPLITS[each]));
  return h(
    "table",
    { class: "figures" },
    columns.length > 0 && h("thead", {}, h("tr", {}, h("td"), ...columns)),
    h("tbody", {}, ...rows),
  );
}
