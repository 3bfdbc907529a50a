// @ts-check
/** Whether the recent images of a task are like its training images. */

import { h, percent, plural } from "../ui.js";

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 600;
const HEIGHT = 140;

/** @param {any} drift */
export function driftPanel(drift) {
  if (drift.distance === null && drift.out_of_distribution === null) return null;
  const points = drift.points.filter((/** @type {any} */ each) => each.distance !== null);
  return h(
    "section",
    { class: "panel drift" },
    h("h2", {}, "Drift"),
    h("p", { class: drift.drifting ? "problem" : "" }, verdict(drift)),
    points.length > 1 && chart(points),
    h("p", { class: "hint" }, figures(drift)),
  );
}

/** @param {any} drift */
function verdict(drift) {
  if (drift.distance === null) return "This version has no statistics of its training images.";
  const distance = `distance ${drift.distance.toFixed(2)}, up to ${drift.limit.toFixed(2)} without drift`;
  return drift.drifting
    ? `Recent images are not like the training images: ${distance}.`
    : `Recent images are like the training images: ${distance}.`;
}

/** @param {any} drift */
function figures(drift) {
  const parts = [`${plural(drift.images, "image")} since the server started`];
  if (drift.out_of_distribution !== null)
    parts.push(`${percent(drift.out_of_distribution)} of recent ones out of distribution`);
  if (drift.class_divergence !== null)
    parts.push(`class shares differ by ${percent(drift.class_divergence)} from the training`);
  return `${parts.join("; ")}.`;
}

/** @param {any[]} points */
function chart(points) {
  const top = 1.15 * Math.max(...points.map((each) => Math.max(each.distance, each.limit)));
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Distance from the training images, and its limit, over time");
  for (const name of ["limit", "distance"]) {
    const line = document.createElementNS(SVG, "polyline");
    const at = points.map((each, index) => {
      const x = (WIDTH * index) / (points.length - 1);
      return `${x.toFixed(1)},${(HEIGHT * (1 - each[name] / top)).toFixed(1)}`;
    });
    line.setAttribute("points", at.join(" "));
    line.setAttribute("class", name);
    svg.append(line);
  }
  const legend = h(
    "figcaption",
    { class: "hint" },
    h("span", { class: "key distance" }, "distance"),
    h("span", { class: "key limit" }, "largest without drift"),
  );
  const figure = h("figure", {});
  figure.append(svg, legend);
  return figure;
}
