// @ts-check
/** The page that watches: throughput, queue and batches, from /metrics, and who serves the store. */

import { request } from "./api.js";
import { parse, total } from "./metrics.js";
import * as replicas from "./replicas.js";
import { byId, h, problemBox } from "./ui.js";

const EVERY_MS = 2000;
const KEPT = 90;
const SVG = "http://www.w3.org/2000/svg";
const [WIDE, TALL] = [240, 48];

/** @typedef {import("./metrics.js").Sample[]} Samples */

/**
 * What a tile shows: a number from now and before, and how it is written. Null: nothing happened.
 * @type {{title: string, about: string, unit: string, digits: number,
 *   read: (now: Samples, before: Samples, seconds: number) => number | null}[]}
 */
const TILES = [
  {
    title: "Throughput",
    about: "images let in, per second",
    unit: "/s",
    digits: 1,
    read: (now, before, seconds) => gained(now, before, "engram_images_admitted_total") / seconds,
  },
  {
    title: "Queue",
    about: "images waiting for the model now",
    unit: "",
    digits: 0,
    read: (now) => total(now, "engram_queue_images"),
  },
  {
    title: "Batch",
    about: "images in one pass, on average",
    unit: "",
    digits: 1,
    read: (now, before) => mean(now, before, "engram_batch_images"),
  },
  {
    title: "Answer",
    about: "from request to answer, on average",
    unit: " ms",
    digits: 1,
    read: (now, before) =>
      scaled(mean(now, before, "engram_request_seconds", { route: "/predict" }), 1000),
  },
  {
    title: "Known images",
    about: "asked about with a kept context",
    unit: " %",
    digits: 0,
    read: (now, before) => {
      const hits = gained(now, before, "engram_cache_hits_total");
      const all = hits + gained(now, before, "engram_cache_misses_total");
      return all ? (100 * hits) / all : null;
    },
  },
  {
    title: "Turned away",
    about: "requests refused, per second",
    unit: "/s",
    digits: 1,
    read: (now, before, seconds) => gained(now, before, "engram_rejections_total") / seconds,
  },
];

/** @type {{at: number, samples: Samples} | null} */
let last = null;
/** @type {{number: HTMLElement, line: SVGPolylineElement, area: SVGPolygonElement, values: (number | null)[]}[]} */
let tiles = [];
let timer = 0;

export function start() {
  document.addEventListener("visibilitychange", () => document.hidden || schedule(0));
}

export function open() {
  if (!tiles.length) tiles = TILES.map(buildTile);
  schedule(0);
}

/** @param {number} wait in milliseconds */
function schedule(wait) {
  clearTimeout(timer);
  timer = setTimeout(watch, wait);
}

async function watch() {
  if (document.hidden || byId("page-live").hidden) return;
  try {
    const text = await (await request("metrics", { headers: { Accept: "text/plain" } })).text();
    byId("live-problem").replaceChildren();
    take(parse(text), performance.now());
    await replicas.look();
  } catch (error) {
    byId("live-problem").replaceChildren(problemBox(error));
  }
  schedule(EVERY_MS);
}

/**
 * @param {Samples} samples
 * @param {number} at
 */
function take(samples, at) {
  const before = last;
  // After a pause the mean over it would be drawn as if it were now.
  if (before && at - before.at < 5 * EVERY_MS) {
    TILES.forEach(({ read, unit, digits }, place) => {
      const value = read(samples, before.samples, (at - before.at) / 1000);
      const tile = tiles[place];
      tile.values = [...tile.values, value].slice(-KEPT);
      tile.number.textContent = value === null ? "–" : value.toFixed(digits) + unit;
      drawLine(tile);
    });
  }
  last = { at, samples };
}

/** @param {typeof TILES[0]} tile */
function buildTile({ title, about }) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDE} ${TALL}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const area = document.createElementNS(SVG, "polygon");
  const line = document.createElementNS(SVG, "polyline");
  svg.append(area, line);
  const number = h("p", { class: "number" }, "–");
  byId("tiles").append(
    h(
      "section",
      { class: "tile" },
      h("h2", {}, title),
      number,
      h("p", { class: "hint" }, about),
      svg,
    ),
  );
  return { number, line, area, values: [] };
}

/** @param {typeof tiles[0]} tile */
function drawLine({ values, line, area }) {
  const most = Math.max(...values.map((value) => value ?? 0), 1e-9);
  const step = WIDE / (KEPT - 1);
  const first = WIDE - (values.length - 1) * step;
  const points = values.map((value, place) => {
    const height = ((value ?? 0) / most) * (TALL - 4);
    return `${(first + place * step).toFixed(1)},${(TALL - 2 - height).toFixed(1)}`;
  });
  line.setAttribute("points", points.join(" "));
  area.setAttribute(
    "points",
    [`${first.toFixed(1)},${TALL}`, ...points, `${WIDE},${TALL}`].join(" "),
  );
}

/**
 * @param {Samples} now
 * @param {Samples} before
 * @param {string} name
 * @param {Record<string, string>} [labels]
 */
function gained(now, before, name, labels) {
  // A server that was started anew counts from zero.
  return Math.max(0, total(now, name, labels) - total(before, name, labels));
}

/**
 * The mean of a histogram between two readings.
 * @param {Samples} now
 * @param {Samples} before
 * @param {string} name
 * @param {Record<string, string>} [labels]
 */
function mean(now, before, name, labels) {
  const count = gained(now, before, `${name}_count`, labels);
  return count ? gained(now, before, `${name}_sum`, labels) / count : null;
}

/**
 * @param {number | null} value
 * @param {number} factor
 */
function scaled(value, factor) {
  return value === null ? null : value * factor;
}
