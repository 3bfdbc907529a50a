// @ts-check
/** The Tasks page: the list with search, filter and pages, or one task. */

import { json, taskPath } from "../api.js";
import { NARROW, badge, busy, byId, choice, debounced, errorBox, h, note, pager, plural } from "../ui.js";
import { showTask } from "./page.js";
import * as upload from "./upload.js";

const PAGE = NARROW.matches ? 15 : 20;
/** @type {[string, string][]} */
const ORDERS = [
  ["name", "Name"],
  ["newest", "Newest first"],
];
/** @type {[string, string][]} */
const STATES = [
  ["served", "Served tasks"],
  ["retired", "Retired tasks"],
];

/** @type {string | null} The task whose details are open. */
let opened = null;
const view = { q: "", team: "", sort: "name", state: "served" };
/** @type {string[]} The cursors of this page and of those before it; the first page has none. */
let cursors = [];
/** Number of the latest request; older answers are ignored. */
let turn = 0;

export function start() {
  upload.start(refresh);
  const search = /** @type {HTMLInputElement} */ (
    h("input", { type: "search", name: "search", autocomplete: "off", spellcheck: "false" })
  );
  const find = debounced(() => change({ q: search.value.trim() }));
  search.addEventListener("input", find);
  byId("task-filter").addEventListener("submit", (event) => event.preventDefault());
  byId("task-filter").append(
    h("label", { class: "grow" }, "Search", search),
    h("div", { id: "team-filter" }),
    choice("Sort", ORDERS, view.sort, (sort) => change({ sort })),
    choice("Show", STATES, view.state, (state) => change({ state })),
  );
}

/** @param {string | null} task */
export async function open(task) {
  opened = task;
  byId("task-list").hidden = task !== null;
  byId("task-detail").hidden = task === null;
  await refresh();
}

async function refresh() {
  const name = opened;
  if (name === null) await showList();
  else await showTask(name, () => opened === name);
}

/** @param {Partial<typeof view>} changes */
function change(changes) {
  Object.assign(view, changes);
  cursors = [];
  showList();
}

async function showList() {
  const mine = ++turn;
  const query = new URLSearchParams({ limit: String(PAGE), sort: view.sort });
  if (view.q) query.set("q", view.q);
  if (view.team) query.set("team", view.team);
  if (view.state === "retired") query.set("retired", "true");
  if (cursors.length) query.set("cursor", cursors[cursors.length - 1]);
  try {
    const listed = await json(`tasks?${query}`);
    if (mine !== turn) return;
    byId("tasks-errors").replaceChildren();
    showPage(listed);
  } catch (error) {
    if (mine === turn) byId("tasks-errors").replaceChildren(errorBox(error));
  }
}

/** @param {any} listed */
function showPage({ tasks, total, next, teams, backbone, generation }) {
  const filtered = view.q || view.team;
  const state = view.state === "retired" ? "retired task" : "task";
  byId("tasks-summary").textContent =
    `${plural(total, state)}${filtered ? " found" : ""} on ${backbone}, generation ${generation}.`;
  showTeams(teams);
  byId("tasks").replaceChildren(...(tasks.length ? tasks.map(row) : [emptyState()]));
  const turnTo = (/** @type {() => void} */ move) => () => {
    move();
    showList();
    byId("task-filter").scrollIntoView({ block: "start" });
  };
  const pages = pager({
    first: cursors.length * PAGE + 1,
    shown: tasks.length,
    total,
    back: turnTo(() => cursors.pop()),
    forward: turnTo(() => cursors.push(next)),
  });
  byId("task-pages").replaceChildren(...(pages ? [pages] : []));
}

/** @param {string[]} teams */
function showTeams(teams) {
  const place = byId("team-filter");
  // The same choice again would take the focus from the one in use.
  if (place.dataset.teams === teams.join()) return;
  place.dataset.teams = teams.join();
  /** @type {[string, string][]} */
  const options = [["", "All teams"], ...teams.map((team) => /** @type {[string, string]} */ ([team, team]))];
  place.replaceChildren(...(teams.length ? [choice("Team", options, view.team, (team) => change({ team }))] : []));
}

function emptyState() {
  const [lead, text] = noneText();
  return h("li", { class: "empty" }, h("p", { class: "lead" }, lead), h("p", {}, ...text));
}

/** @returns {[string, (string | Node)[]]} */
function noneText() {
  if (view.q || view.team) return ["No task found", ["No name or description has this text. Change the search."]];
  if (view.state === "retired") return ["No retired tasks", ["A retired task appears here and can be restored."]];
  return ["No tasks yet", ["Train one with ", h("code", {}, "engram train"), " and drop its bundle above."]];
}

/** @param {any} task */
function row(task) {
  const of = task.versions.length > 1 ? ` of ${task.versions.length}` : "";
  const kind = `${task.task_type.replaceAll("_", " ")}, ${plural(task.classes, "class", "classes")}`;
  const retired = task.status === "retired";
  const version = task.version === null ? (retired ? "" : "built in") : `version ${task.version}${of}`;
  return h(
    "li",
    { "data-task": task.task },
    h("a", { class: "name", href: `#tasks/${encodeURIComponent(task.task)}` }, task.task),
    badge(task.status),
    h("span", { class: task.reason ? "about failed" : "about" }, task.reason ?? task.description),
    h("span", { class: "hint kind" }, kind),
    retired ? restoreButton(task.task) : h("span", { class: "hint versions" }, version),
  );
}

/** @param {string} task */
function restoreButton(task) {
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: "restore", "aria-label": `Restore ${task}` }, "Restore")
  );
  button.addEventListener("click", () =>
    busy(button, async () => {
      try {
        await json(taskPath(task, "restore"), { method: "POST" });
        note(`${task} is served again.`);
        await showList();
      } catch (error) {
        byId("tasks-errors").replaceChildren(errorBox(error));
      }
    }),
  );
  return button;
}
