// @ts-check
/** The answers for one photo: a card per task, grouped by team if there are many. */

import { renderAnswer } from "../answer.js";
import { correction } from "../correct.js";
import { drawSeen } from "../heatmap.js";
import { NARROW, h, inSteps, milliseconds, percent, plural } from "../ui.js";

/**
 * @typedef {import("../answer.js").Answer} Answer
 * @typedef {[task: string, answer: Answer]} Entry
 * @typedef {{photo: import("./photo.js").Photo, file: File, shown: import("../heatmap.js").Picture | null,
 *   looking: string | null, look: (task: string) => void, corrected: (task: string) => Promise<void>}} Context
 */

const SMALL = 192; // pixels of a small map's width
const UNGROUPED = 12; // up to this many tasks are shown as plain cards
const STEP = NARROW.matches ? 5 : 12; // cards shown at once of more
const GROUPS = 20; // teams shown at first
const SPOKEN = 8; // answers that a screen reader reads; of more it reads a summary

/**
 * @param {Entry[]} entries
 * @param {Context} context
 */
export function answerCards(entries, context) {
  const render = (/** @type {Entry} */ entry) => card(entry, context);
  if (!entries.length) return [noTasks()];
  if (entries.length <= UNGROUPED) return [h("div", { class: "cards" }, ...entries.map(render))];
  const groups = [...byTeam(entries)];
  if (groups.length === 1) return inSteps("answers", entries, STEP, render, h("div", { class: "cards" }));
  const list = h("div", { class: "groups" });
  return inSteps("teams", groups, GROUPS, (each) => group(each, each === groups[0], render), list);
}

/** @param {Entry[]} entries */
function byTeam(entries) {
  /** @type {Map<string, Entry[]>} */
  const teams = new Map();
  for (const entry of entries) {
    const team = entry[0].includes("/") ? entry[0].split("/", 1)[0] : "";
    teams.set(team, [...(teams.get(team) ?? []), entry]);
  }
  return teams;
}

/**
 * @param {[team: string, entries: Entry[]]} team
 * @param {boolean} open
 * @param {(entry: Entry) => Node} render
 */
function group([team, entries], open, render) {
  const counts = plural(entries.length, "task") + unknownCount(", ", entries);
  const details = /** @type {HTMLDetailsElement} */ (
    h(
      "details",
      { class: "panel group", open },
      h("summary", {}, team || "No team", " ", h("span", { class: "hint" }, counts)),
    )
  );
  // Cards are made when they are first seen: there may be hundreds, each with a map.
  const fill = () => {
    if (!details.open || details.childElementCount > 1) return;
    details.append(...inSteps("answers", entries, STEP, render, h("div", { class: "cards" })));
  };
  details.addEventListener("toggle", fill);
  fill();
  return details;
}

/**
 * @param {string} before
 * @param {Entry[]} entries
 * @param {string} [after]
 */
function unknownCount(before, entries, after = "") {
  const count = entries.filter(([, found]) => found.in_distribution === false).length;
  return count ? `${before}${count} out of distribution${after}` : "";
}

function noTasks() {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "lead" }, "There are no tasks yet"),
    h(
      "p",
      {},
      "The image was read, but there is no task to classify it. ",
      h("a", { href: "#tasks" }, "Publish a task"),
      ".",
    ),
  );
}

/**
 * @param {Entry} entry
 * @param {Context} context
 */
function card([task, found], { photo, file, shown, looking, look, corrected }) {
  const version = found.version === null ? "built in" : `version ${found.version}`;
  const map = shown && found.attention && photo.detail && lookButton(task, found.attention, shown, photo.detail.view);
  map?.setAttribute("aria-pressed", String(looking === task));
  map?.addEventListener("click", () => look(task));
  return h(
    "article",
    { class: "card", "data-task": task },
    map,
    h(
      "div",
      { class: "grow" },
      h("header", {}, h("h2", {}, task), h("span", { class: "hint" }, version)),
      ...renderAnswer(found),
      correction(task, found, { file, digest: photo.digest }, () => corrected(task)),
    ),
  );
}

/**
 * @param {string} task
 * @param {import("../heatmap.js").Attention} attention
 * @param {import("../heatmap.js").Picture} shown
 * @param {import("../heatmap.js").View} view
 */
function lookButton(task, attention, shown, view) {
  const { grid } = attention;
  const height = Math.round((SMALL * grid.length) / grid[0].length);
  const small = /** @type {HTMLCanvasElement} */ (h("canvas", { width: SMALL, height }));
  drawSeen(small, shown, attention, view);
  const attributes = {
    type: "button",
    class: "look",
    "data-task": task,
    "aria-label": `Show the attention of ${task}`,
    title: `Attention of ${task}`,
  };
  return h("button", attributes, small);
}

/** @type {Record<string, string>} */
const CACHE = {
  hit: "The image was cached: only the tasks were computed.",
  miss: "The image was new; its context is now cached.",
  off: "The context cache is off on this server.",
};

/**
 * How long the parts of an answer took.
 * @param {any} answer
 */
export function facts(answer) {
  const image = answer.images[0];
  const { queue: waited, decode: decoded, forward, total } = answer.timings_ms;
  const parts = [
    ["waiting", waited],
    ["decoding", decoded],
    ["model", forward],
    ["other", Math.max(0, total - waited - decoded - forward)],
  ];
  const line = h("div", { class: "timeline", "aria-hidden": "true" });
  for (const [name, took] of parts) {
    const part = h("span", { "data-part": name });
    part.style.setProperty("--share", String(took / total));
    line.append(part);
  }
  const tasks = plural(Object.keys(image.tasks).length, "task");
  const left = answer.omitted ? ` · ${plural(answer.omitted, "task")} left out: choose them above` : null;
  return h(
    "div",
    { class: "facts" },
    h("p", { class: "took" }, h("b", {}, milliseconds(total)), ` for ${tasks}`, left),
    line,
    h(
      "ul",
      { class: "parts" },
      ...parts.map(([name, took]) =>
        h("li", { "data-part": name }, `${name} ${milliseconds(Number(took))}`),
      ),
    ),
    h(
      "p",
      { class: "hint" },
      h("span", { class: "badge", "data-cache": image.cache }, `cache ${image.cache}`),
      " ",
      CACHE[image.cache],
    ),
    h(
      "p",
      { class: "hint digest" },
      `${answer.backbone} · generation ${answer.generation} · `,
      h("code", { title: image.digest }, `${image.digest.slice(0, 19)}…`),
    ),
  );
}

/**
 * The screen reader text for new answers.
 * @param {string} name
 * @param {Entry[]} entries
 */
export function spoken(name, entries) {
  const summary = `${plural(entries.length, "task")} answered for ${name}.`;
  if (entries.length > SPOKEN) return summary + unknownCount(" ", entries, ".");
  const best = entries.flatMap(([task, { predictions, in_distribution: known }]) => {
    const first = predictions?.[0];
    if (!first) return [];
    return `${task}: ${first.label}, ${percent(first.score)}${known === false ? ", out of distribution" : ""}`;
  });
  return `${summary} ${best.join(". ")}`;
}
