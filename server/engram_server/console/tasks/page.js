// @ts-check
/** The task page: versions, aliases, metrics, history and changes. */

import { json, Problem, request, taskPath } from "../api.js";
import { isTaught } from "../examples.js";
import { ask, badge, busy, byId, errorBox, h, note, plural, saveAs, size, time } from "../ui.js";
import { classes } from "./classes.js";
import { codePanel } from "./code.js";
import { comparisonPanel } from "./comparison.js";
import { corrections } from "./corrections.js";
import { driftPanel } from "./drift.js";
import { history } from "./history.js";
import { metrics } from "./metrics.js";

const ALIAS = "[a-z][a-z0-9._\\-]{0,62}";

/**
 * Send a change and show a message.
 * @typedef {(below: string, options: RequestInit, message: (now: any) => string,
 *   undo?: () => void) => Promise<void>} Change
 */

/**
 * @param {string} name
 * @param {() => boolean} isOpen whether the task is still shown
 */
export async function showTask(name, isOpen) {
  const place = byId("task-detail");
  const back = h("p", {}, h("a", { href: "#tasks" }, "← All tasks"));
  if (place.dataset.task !== name)
    place.replaceChildren(back, h("p", { class: "waiting" }, "Loading…"));
  place.dataset.task = name;
  try {
    const content = await read(name, () => showTask(name, isOpen));
    if (isOpen()) place.replaceChildren(back, ...content);
  } catch (error) {
    const retired = error instanceof Problem && error.kind === "retired-task";
    const content = retired ? await retiredTask(name) : [errorBox(error)];
    if (isOpen()) place.replaceChildren(back, ...content);
  }
}

/**
 * @param {string} name
 * @param {() => Promise<void>} again reloads the task
 */
async function read(name, again) {
  const response = await request(taskPath(name));
  const task = await response.json();
  const versions = [...task.version_details].reverse();
  const manifests = await Promise.all(versions.map((each) => manifestOf(name, each.version)));
  const taught = isTaught(manifests[versions.findIndex((each) => each.version === task.version)]);
  const [changes, corrected, compared, drift] = await Promise.all([
    versions.length ? json(taskPath(name, "history?limit=20")) : null,
    versions.length && !taught ? corrections(name) : null,
    versions.length ? json(taskPath(name, "comparison")) : null,
    versions.length ? json(taskPath(name, "drift")) : null,
  ]);
  const change = changer(name, response.headers.get("ETag") ?? "*", again);
  return [
    heading(task, taught, change),
    h("div", { id: "task-errors" }),
    ...(compared ? panel(comparisonPanel(task, compared, promoter(task, change), button)) : []),
    ...(drift ? panel(driftPanel(drift)) : []),
    codePanel(name),
    ...versions.map((each, at) => versionPanel(task, each, manifests[at], change)),
    ...(task.class_labels?.length ? [classes(task.class_labels)] : []),
    ...(corrected ? [corrected] : []),
    ...(changes ? [history(changes.entries)] : []),
  ];
}

/** @param {HTMLElement | null} content */
const panel = (content) => (content ? [content] : []);

/**
 * @param {any} task
 * @param {Change} change
 */
function promoter(task, change) {
  return (/** @type {string} */ source, /** @type {any} */ body) => {
    const options = { method: "POST", body: JSON.stringify({ from: source, ...body }) };
    const message = (/** @type {any} */ now) => `${task.task} is at version ${now.aliases.default} now.`;
    return change("promote", options, message);
  };
}

/**
 * The page of a retired task: it can be restored.
 * @param {string} name
 */
async function retiredTask(name) {
  const changes = await json(taskPath(name, "history?limit=20")).catch(() => null);
  return [
    h(
      "div",
      { class: "heading" },
      h("h1", {}, name, " ", badge("retired")),
      h("p", {}, "This task is retired and does not answer. Its versions are kept."),
      h("div", { class: "actions" }, button("Restore", () => restore(name, "restore"), "primary")),
    ),
    ...(changes ? [history(changes.entries)] : []),
  ];
}

/**
 * The manifest of a version; null if its bundle cannot be read.
 * @param {string} name
 * @param {number} version
 */
async function manifestOf(name, version) {
  try {
    return await json(taskPath(name, `versions/${version}/manifest`));
  } catch {
    return null;
  }
}

// Changing

/**
 * Send changes with If-Match, so that a concurrent change is not overwritten.
 * @param {string} name
 * @param {string} etag
 * @param {() => Promise<void>} again reloads the task
 * @returns {Change}
 */
function changer(name, etag, again) {
  return async (below, options, message, undo) => {
    const headers = { "Content-Type": "application/json", "If-Match": etag };
    let now;
    try {
      now = await json(taskPath(name, below), { ...options, headers });
    } catch (error) {
      // The page may be out of date: reload it and show the error.
      await again();
      document.getElementById("task-errors")?.replaceChildren(errorBox(error));
      return;
    }
    note(message(now), undo && { label: "Undo", run: undo });
    if (now.versions.length) await again();
    else location.hash = "#tasks";
  };
}

/**
 * Restore a retired task or version.
 * @param {string} name
 * @param {string} below
 */
async function restore(name, below) {
  try {
    await json(taskPath(name, below), { method: "POST" });
    note(`${name} is served again.`);
  } catch (error) {
    note(error instanceof Error ? error.message : String(error));
  }
  window.dispatchEvent(new HashChangeEvent("hashchange"));
}

/**
 * @param {string} name
 * @param {Change} change
 */
async function retireTask(name, change) {
  const body = [
    h("p", {}, "It stops answering at once. Its bundles are kept, and you can restore it."),
  ];
  const sure = await ask({
    title: `Retire ${name}?`,
    body,
    confirm: "Retire it",
    danger: true,
    read: () => true,
  });
  const undo = () => restore(name, "restore");
  if (sure) await change("", { method: "DELETE" }, () => `${name} is retired.`, undo);
}

/**
 * @param {string} name
 * @param {number} version
 * @param {Change} change
 */
async function retireVersion(name, version, change) {
  const title = `Retire version ${version} of ${name}?`;
  const body = [h("p", {}, "It stops answering at once. Its bundle is kept.")];
  const sure = await ask({ title, body, confirm: "Retire it", danger: true, read: () => true });
  const undo = () => restore(name, `restore?version=${version}`);
  const below = `versions/${version}`;
  if (sure) await change(below, { method: "DELETE" }, () => `${name}@${version} is retired.`, undo);
}

/**
 * @param {any} task
 * @param {number} version
 * @param {string} alias
 * @param {Change} change
 */
function point(task, version, alias, change) {
  const options = { method: "PUT", body: JSON.stringify({ version }) };
  return change(`aliases/${alias}`, options, () => `${task.task}:${alias} is version ${version}.`);
}

/**
 * @param {any} task
 * @param {number} version
 * @param {Change} change
 */
async function moveAlias(task, version, change) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      required: true,
      pattern: ALIAS,
      list: "aliases",
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      title: "Lower-case letters, digits and ._-; starts with a letter",
    })
  );
  const existing = h(
    "datalist",
    { id: "aliases" },
    ...Object.keys(task.aliases).map((each) => h("option", { value: each })),
  );
  const alias = await ask({
    title: `Point an alias to version ${version}`,
    body: [
      h("label", {}, "Alias", input),
      existing,
      h("p", { class: "hint" }, `A new alias is created. Clients use it as ${task.task}:alias.`),
    ],
    confirm: "Move",
    read: () => input.value,
  });
  if (alias) await point(task, version, alias, change);
}

// Showing

/**
 * @param {string} text
 * @param {() => Promise<void>} run
 * @param {string} [kind]
 */
function button(text, run, kind) {
  const it = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: kind, onclick: () => busy(it, run) }, text)
  );
  return it;
}

/**
 * @param {any} task
 * @param {boolean} taught
 * @param {Change} change
 */
function heading(task, taught, change) {
  const back = (/** @type {any} */ now) =>
    `${task.task} is back at version ${now.aliases.default}.`;
  return h(
    "div",
    { class: "heading" },
    h("h1", {}, task.task, " ", badge(task.status)),
    h("p", {}, task.description || "No description."),
    h(
      "p",
      { class: "hint" },
      `${task.task_type.replaceAll("_", " ")}, ${plural(task.classes, "class", "classes")}`,
    ),
    task.version !== null &&
      h(
        "div",
        { class: "actions" },
        taught && h("a", { class: "button", href: `#teach/${encodeURIComponent(task.task)}` }, "Teach it more"),
        task.rollback_target !== null &&
          button(`Roll back to version ${task.rollback_target}`, () =>
            change("rollback", { method: "POST" }, back),
          ),
        button("Retire the task…", () => retireTask(task.task, change), "danger"),
      ),
  );
}

/**
 * @param {any} task
 * @param {any} version
 * @param {any} manifest
 * @param {Change} change
 */
function versionPanel(task, version, manifest, change) {
  const number = version.version;
  const tags = version.aliases.map((/** @type {string} */ each) =>
    h("span", { class: "tag" }, each),
  );
  return h(
    "section",
    { class: "panel version", "data-version": number },
    h("header", {}, h("h2", {}, `Version ${number}`), ...tags, badge(version.status)),
    version.reason && h("p", { class: "problem" }, version.reason),
    version.description !== task.description &&
      h("p", {}, version.description || "No description."),
    metrics(manifest),
    h("dl", { class: "rows" }, ...facts(version, manifest)),
    h(
      "div",
      { class: "actions" },
      task.aliases.default !== number &&
        button("Make default", () => point(task, number, "default", change)),
      button("Point an alias here…", () => moveAlias(task, number, change)),
      button("Download", () => download(task.task, number)),
      task.versions.length > 1 &&
        button("Retire…", () => retireVersion(task.task, number, change), "danger"),
    ),
  );
}

/**
 * Fetched, not linked to: a link cannot carry the key.
 * @param {string} name
 * @param {number} version
 */
async function download(name, version) {
  const response = await request(taskPath(name, `versions/${version}/bundle`));
  saveAs(await response.blob(), `${name.replace("/", "-")}-${version}.safetensors`);
}

/**
 * @param {any} version
 * @param {any} manifest
 */
function facts(version, manifest) {
  const memory = `${plural(version.memory_tokens, "memory token")} per layer`;
  const place = version.resident ? ", on the device" : "";
  const codes = version.extends.map((/** @type {string} */ digest) => h("code", {}, digest));
  const rows = [
    ["Published", time(version.published), ` by ${version.actor}`],
    ["Size", `${size(version.size_bytes)}, ${memory}${place}`],
    ["Digest", h("code", {}, version.digest)],
    ...(codes.length ? [["Extends", ...codes]] : []),
    ...(manifest?.license ? [["Licence", manifest.license]] : []),
  ];
  return rows.flatMap(([name, ...values]) => [h("dt", {}, name), h("dd", {}, ...values)]);
}
