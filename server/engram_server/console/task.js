// @ts-check
/** The task page: versions, aliases, metrics, history and changes. */

import { json, request, taskPath } from "./api.js";
import { isTaught } from "./examples.js";
import {
  ask,
  badge,
  busy,
  byId,
  h,
  note,
  percent,
  plural,
  errorBox,
  saveAs,
  size,
  time,
} from "./ui.js";

const ALIAS = "[a-z][a-z0-9._\\-]{0,62}";
const CLASSES_SHOWN = 200;
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
  const again = () => showTask(name, isOpen);
  try {
    const response = await request(taskPath(name));
    const task = await response.json();
    const versions = [...task.version_details].reverse();
    const history = versions.length ? await json(taskPath(name, "history?limit=20")) : null;
    const manifests = await Promise.all(versions.map((each) => manifestOf(name, each.version)));
    if (!isOpen()) return;
    const change = changer(name, response.headers.get("ETag") ?? "*", again);
    place.replaceChildren(
      back,
      heading(task, isTaught(manifests[versions.findIndex((each) => each.version === task.version)]), change),
      h("div", { id: "task-errors" }),
      ...versions.map((each, at) => versionPanel(task, each, manifests[at], change)),
      ...(task.class_labels?.length ? [classes(task.class_labels)] : []),
      ...(history ? [log(history.entries)] : []),
    );
  } catch (error) {
    if (isOpen()) place.replaceChildren(back, errorBox(error));
  }
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
    note(`${name} is being served again.`);
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
        button("Roll back", () => change("rollback", { method: "POST" }, back)),
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
 * The figure that speaks for the version in a line, and all of them to be unfolded.
 * @param {any} manifest
 */
function metrics(manifest) {
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

/** @param {string[]} labels */
function classes(labels) {
  const shown = labels.slice(0, CLASSES_SHOWN).map((label) => label.replaceAll("_", " "));
  const rest = labels.length - shown.length;
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, plural(labels.length, "class", "classes")),
    h("p", { class: "classes" }, shown.join(", ") + (rest ? ` and ${rest} more.` : ".")),
  );
}

/** @param {any} entry */
function describe(entry) {
  const versions = (entry.versions ?? []).join(", ");
  const aliases = (entry.aliases ?? []).join(", ");
  switch (entry.kind) {
    case "publish":
      return `published version ${entry.version}${aliases && ` as ${aliases}`}`;
    case "alias":
      if (entry.version === null) return `removed ${aliases}`;
      return `${entry.rollback ? "rolled" : "moved"} ${aliases} ${entry.rollback ? "back " : ""}to version ${entry.version}`;
    case "retire":
      return entry.whole ? "retired the task" : `retired version ${versions}`;
    case "purge":
      return entry.whole ? "purged the task" : `purged version ${versions}`;
    default:
      return `restored version ${versions}`;
  }
}

/** @param {any[]} entries */
function log(entries) {
  const items = entries.map((each) =>
    h(
      "li",
      {},
      time(each.time),
      h("span", {}, describe(each), each.note && h("span", { class: "hint" }, ` · ${each.note}`)),
      h("span", { class: "hint" }, each.actor),
    ),
  );
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, "History"),
    h("ol", { class: "history" }, ...items),
  );
}
