// @ts-check
/** Publishing a bundle: dropped, judged by the server at once, named, and sent. */

import { Problem, TASK_NAME, json, taskPath } from "../api.js";
import { busy, byId, debounced, errorBox, h, note, plural, size } from "../ui.js";

/** @type {() => Promise<void>} */
let changed = async () => {};
/** Counts what was dropped, so that a slow verdict does not replace that on a later file. */
let turn = 0;

/** @param {() => Promise<void>} onPublished */
export function start(onPublished) {
  changed = onPublished;
  invite();
}

function invite() {
  const chooser = /** @type {HTMLInputElement} */ (
    h("input", {
      class: "unseen",
      type: "file",
      accept: ".safetensors",
      tabindex: -1,
      "aria-hidden": "true",
      id: "bundle",
    })
  );
  chooser.addEventListener("change", () => {
    if (chooser.files?.[0]) judge(chooser.files[0]);
  });
  const choose = () => chooser.click();
  byId("upload").replaceChildren(
    h(
      "div",
      { class: "drop small" },
      h("p", {}, h("b", {}, "Drop a bundle"), " to check it and publish it as a task."),
      h("button", { type: "button", onclick: choose }, "Choose a bundle"),
      chooser,
    ),
  );
}

/**
 * Show what the server thinks of a bundle, and what can be done with it.
 * @param {File} file
 */
export async function judge(file) {
  const mine = ++turn;
  const place = byId("upload");
  place.replaceChildren(
    h(
      "div",
      { class: "panel", role: "status" },
      h("p", { class: "waiting" }, `Checking ${file.name}…`),
    ),
  );
  try {
    const verdict = await json("tasks/validate", {
      method: "POST",
      body: file,
      headers: { "Content-Type": "application/octet-stream" },
    });
    if (mine !== turn) return;
    place.replaceChildren(verdictPanel(file, verdict));
    place.querySelector("h2")?.focus();
  } catch (error) {
    if (mine === turn)
      place.replaceChildren(h("div", { class: "panel" }, errorBox(error), dismiss("Close")));
  }
}

/**
 * @param {File} file
 * @param {any} verdict
 */
function verdictPanel(file, verdict) {
  const heading = h("h2", { tabindex: -1 }, file.name);
  const facts = verdict.manifest ? manifestFacts(verdict, file) : null;
  if (!verdict.valid) {
    const problem = new Problem("This bundle cannot be served here", verdict.problems.join(" "));
    return h(
      "div",
      { class: "panel verdict", "data-valid": "false" },
      heading,
      errorBox(problem),
      facts,
      dismiss("Close"),
    );
  }
  return h(
    "div",
    { class: "panel verdict", "data-valid": "true" },
    heading,
    h(
      "p",
      { role: "status" },
      h("span", { class: "badge", "data-state": "ready" }, "Valid"),
      " Its shapes and golden answers fit this server's backbone.",
    ),
    facts,
    publishForm(file, suggestedName(file, verdict.manifest)),
  );
}

/**
 * @param {any} verdict
 * @param {File} file
 */
function manifestFacts({ manifest, classes, memory_tokens: memory }, file) {
  const metrics = Object.entries(manifest.metrics).map(
    ([name, value]) => `${name} ${Number(value).toPrecision(4)}`,
  );
  const rows = [
    ["About", manifest.description || "no description"],
    ["Task type", `${manifest.task_type.replaceAll("_", " ")}, ${plural(classes, "output")}`],
    ["Size", `${size(file.size)}, ${plural(memory, "memory token")} per layer`],
    ["Backbone", manifest.backbone.name],
    ["Metrics", metrics.join(" · ") || "none"],
  ];
  return h(
    "dl",
    { class: "rows" },
    ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

/**
 * The name in the manifest; the file's name if it has none.
 * @param {File} file
 * @param {any} manifest
 */
function suggestedName(file, manifest) {
  if (TASK_NAME.test(manifest.name ?? "")) return manifest.name;
  return file.name
    .toLowerCase()
    .replace(/\.safetensors$/, "")
    .replace(/[^a-z0-9._-]+/g, "-")
    .replace(/^[^a-z0-9]+/, "");
}

/**
 * @param {File} file
 * @param {string} suggested
 */
function publishForm(file, suggested) {
  const name = /** @type {HTMLInputElement} */ (
    h("input", {
      name: "task",
      value: suggested,
      required: true,
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      maxlength: 127,
      "aria-describedby": "publish-hint",
    })
  );
  const alias = /** @type {HTMLInputElement} */ (
    h("input", {
      name: "alias",
      value: "default",
      required: true,
      autocomplete: "off",
      autocapitalize: "off",
      spellcheck: "false",
      size: 12,
    })
  );
  const hint = h("p", { class: "hint", id: "publish-hint", role: "status" });
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "submit", class: "primary" }, "Publish")
  );
  const errors = h("div", {});
  const explain = debounced(async () => {
    const text = await outcome(name.value, alias.value);
    if (!button.disabled) hint.textContent = text;
  });
  const check = () => {
    const valid = TASK_NAME.test(name.value);
    button.disabled = !valid || !alias.value;
    hint.textContent = valid
      ? ""
      : "A name has small letters, digits and ._-, at most one team/ in front, and starts with a letter or digit.";
    if (valid) explain();
  };
  name.addEventListener("input", check);
  alias.addEventListener("input", check);
  check();
  const publish = async (/** @type {Event} */ event) => {
    event.preventDefault();
    await busy(button, async () => {
      try {
        await send(file, name.value, alias.value);
      } catch (error) {
        errors.replaceChildren(errorBox(error));
      }
    });
  };
  return h(
    "form",
    { class: "publish", onsubmit: publish },
    h(
      "div",
      { class: "row" },
      h("label", { class: "grow" }, "Task", name),
      h("label", {}, "Alias", alias),
      button,
      dismiss("Cancel"),
    ),
    hint,
    errors,
  );
}

/**
 * What publishing under this name would do.
 * @param {string} name
 * @param {string} alias
 */
async function outcome(name, alias) {
  const served = alias === "default" ? "becomes the default" : `is available as ${name}:${alias}`;
  if (name === "base") return "base is the backbone's own head: choose another name.";
  try {
    const { versions } = await json(taskPath(name));
    return `${name} has ${plural(versions.length, "version")}. This becomes the next, and ${served}.`;
  } catch (error) {
    if (!(error instanceof Problem) || error.status !== 404) return "";
    if (error.kind === "retired-task") return `${name} is retired. This becomes its next version, and ${served}.`;
    return `A new task. Its version 1 ${served}.`;
  }
}

/**
 * @param {File} file
 * @param {string} name
 * @param {string} alias
 */
async function send(file, name, alias) {
  const query = new URLSearchParams({ alias });
  const done = await json(`${taskPath(name)}?${query}`, {
    method: "PUT",
    body: file,
    headers: { "Content-Type": "application/octet-stream" },
  });
  invite();
  note(
    done.created
      ? `${done.task} version ${done.version} is being served.`
      : `${done.task} has these bytes already, as version ${done.version}.`,
  );
  await changed();
}

/** @param {string} text */
function dismiss(text) {
  return h("button", { type: "button", onclick: invite }, text);
}
