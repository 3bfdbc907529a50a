// @ts-check
/** The page of tasks: the list, or one task. */

import { json } from "./api.js";
import { showTask } from "./task.js";
import { badge, byId, h, plural, errorBox } from "./ui.js";
import * as upload from "./upload.js";

/** @type {string | null} The task whose details are open. */
let opened = null;

export function start() {
  upload.start(refresh);
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

async function showList() {
  try {
    const listed = await json("tasks");
    upload.setKnown(
      new Map(listed.tasks.map((/** @type {any} */ each) => [each.task, each.versions])),
    );
    byId("tasks-summary").textContent =
      `${plural(listed.tasks.length, "task")} on ${listed.backbone}, generation ${listed.generation}.`;
    byId("tasks-errors").replaceChildren();
    byId("tasks").replaceChildren(...(listed.tasks.length ? listed.tasks.map(row) : [emptyState()]));
  } catch (error) {
    byId("tasks-errors").replaceChildren(errorBox(error));
  }
}

function emptyState() {
  return h(
    "li",
    { class: "empty" },
    h("p", { class: "lead" }, "No tasks yet"),
    h("p", {}, "Train one with ", h("code", {}, "engram train"), " and drop its bundle above."),
  );
}

/** @param {any} task */
function row(task) {
  const of = task.versions.length > 1 ? ` of ${task.versions.length}` : "";
  const kind = `${task.task_type.replaceAll("_", " ")}, ${plural(task.classes, "class", "classes")}`;
  return h(
    "li",
    { "data-task": task.task },
    h("a", { class: "name", href: `#tasks/${encodeURIComponent(task.task)}` }, task.task),
    badge(task.status),
    h("span", { class: task.reason ? "about failed" : "about" }, task.reason ?? task.description),
    h("span", { class: "hint kind" }, kind),
    h(
      "span",
      { class: "hint versions" },
      task.version === null ? "built in" : `version ${task.version}${of}`,
    ),
  );
}
