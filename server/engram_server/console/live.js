// @ts-check
/** The Live page: throughput, queue and batches from /metrics, and the replicas. */

import { request } from "./api.js";
import { least, parse, total } from "./metrics.js";
import * as replicas from "./replicas.js";
import { byId, h, errorBox } from "./ui.js";

const EVERY_MS = 2000;
const SECOND_MS = 500; // rates need two readings: the second one comes soon
const KEPT = 90;
const SVG = "http://www.w3.org/2000/svg";
const [WIDE, TALL] = [240, 48];

/** @typedef {import("./metrics.js").Sample[]} Samples */

/**
 * What a tile shows: a number from now and before, and how it is written. Null: nothing happened.
 * `momentary`: a gauge, not a rate; `counted`: a counter whose total is shown as well.
 * @type {{title: string, about: string, unit: string, digits: number, momentary?: boolean, counted?: string,
 *   read: (now: Samples, before: Samples, seconds: number) => number | null}[]}
 */
const TILES = [
  {
    title: "Throughput",
    about: "images admitted per second",
    counted: "engram_images_admitted_total",
    unit: "/s",
    digits: 1,
    read: (now, before, seconds) => gained(now, before, "engram_images_admitted_total") / seconds,
  },
  {
    title: "Queue",
    about: "images waiting for the model now",
    unit: "",
    digits: 0,
    momentary: true,
    read: (now) => total(now, "engram_queue_images"),
  },
  {
    title: "Batch",
    about: "mean number of images in a pass",
    unit: "",
    digits: 1,
    read: (now, before) => mean(now, before, "engram_batch_images"),
  },
  {
    title: "Answer",
    about: "mean time from request to answer",
    unit: " ms",
    digits: 1,
    read: (now, before) =>
      scaled(mean(now, before, "engram_request_seconds", { route: "/predict" }), 1000),
  },
  {
    title: "Cached images",
    about: "served from the context cache",
    unit: " %",
    digits: 0,
    read: (now, before) => {
      const hits = gained(now, before, "engram_cache_hits_total");
      const all = hits + gained(now, before, "engram_cache_misses_total");
      return all ? (100 * hits) / all : null;
    },
  },
  {
    title: "Rejected",
    about: "requests rejected per second",
    counted: "engram_rejections_total",
    unit: "/s",
    digits: 1,
    read: (now, before, seconds) => gained(now, before, "engram_rejections_total") / seconds,
  },
];

/** @type {{at: number, samples: Samples} | null} */
let last = null;
/** @type {{number: HTMLElement, about: HTMLElement, line: SVGPolylineElement, area: SVGPolygonElement, values: (number | null)[]}[]} */
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
  let wait = EVERY_MS;
  try {
    const [first] = await Promise.all([readMetrics(), replicas.look()]);
    if (first) wait = SECOND_MS;
    byId("live-errors").replaceChildren();
  } catch (error) {
    byId("live-errors").replaceChildren(errorBox(error));
  }
  schedule(wait);
}

/** Show what the metrics say; whether it was the first reading, or the first after a pause. */
async function readMetrics() {
  const text = await (await request("metrics", { headers: { Accept: "text/plain" } })).text();
  const at = performance.now();
  // After a pause the mean over it would be drawn as if it were now.
  const before = last && at - last.at < 5 * EVERY_MS ? last : null;
  last = { at, samples: parse(text) };
  showReading(last, before);
  return !before;
}

/**
 * @param {{at: number, samples: Samples}} now
 * @param {{at: number, samples: Samples} | null} before
 */
function showReading(now, before) {
  const started = least(now.samples, "process_start_time_seconds"); // of several processes
  const lifetime = Math.max(1, Date.now() / 1000 - started);
  TILES.forEach(({ about, read, unit, digits, momentary, counted }, place) => {
    const tile = tiles[place];
    const seconds = before ? (now.at - before.at) / 1000 : 0;
    const recent = before ? read(now.samples, before.samples, seconds) : null;
    if (before) {
      tile.values = [...tile.values, recent].slice(-KEPT);
      drawLine(tile);
    }
    // Counters begin at zero with the server: without a reading before, or news since, this is it.
    const value = recent ?? read(now.samples, [], lifetime);
    tile.number.textContent = value === null ? "none yet" : value.toFixed(digits) + unit;
    tile.number.toggleAttribute("data-none", value === null);
    if (counted) {
      const all = total(now.samples, counted).toLocaleString("en");
      tile.about.textContent = `${about} · ${all} since the start`;
    } else {
      const whole = recent === null && value !== null && !momentary;
      tile.about.textContent = whole ? `${about} since the start` : about;
    }
  });
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
  const number = h("p", { class: "number", "data-none": true }, "…");
  const hint = h("p", { class: "hint" }, about);
  byId("tiles").append(
    h(
      "section",
      { class: "tile" },
      h("h2", {}, title),
      number,
      hint,
      svg,
    ),
  );
  return { number, about: hint, line, area, values: [] };
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
