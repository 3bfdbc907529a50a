// @ts-check
/** "This is …": report the true label of a photo. */

import { json, taskPath } from "./api.js";
import { correct, isTaught, takeBack } from "./examples.js";
import { busy, h, note, errorBox } from "./ui.js";

/**
 * @typedef {{file: File, digest: string}} AnsweredPhoto
 * @typedef {(labels: string[]) => Promise<void>} Save
 */

const BUTTONS = 8; // offer all classes up to this number, else the predicted ones
let count = 0;

/**
 * A button that opens the choice of labels; null for tasks without labels.
 * @param {string} ref the task reference
 * @param {import("./answer.js").Answer} found
 * @param {AnsweredPhoto} photo
 * @param {() => Promise<void>} corrected predicts again
 */
export function correction(ref, found, photo, corrected) {
  if (!found.predictions || found.version === null) return null;
  const task = ref.split(/[@:]/, 1)[0];
  const answered = found.predictions.map((each) => each.label);
  const place = h("div", { id: `correction-${++count}`, hidden: true });
  const attributes = {
    type: "button",
    class: "quiet",
    "aria-expanded": "false",
    "aria-controls": place.id,
    "aria-label": `This is … (correct ${task})`,
  };
  const button = h("button", attributes, "This is …");
  button.addEventListener("click", async () => {
    place.hidden = !place.hidden;
    button.setAttribute("aria-expanded", String(!place.hidden));
    if (place.hidden || place.hasChildNodes()) return;
    try {
      const manifest = await json(taskPath(task, `versions/${found.version}/manifest`));
      const errors = h("div", {});
      const save = saver(task, photo, isTaught(manifest), corrected, errors);
      place.replaceChildren(choices(manifest, answered, save), errors);
    } catch (error) {
      place.replaceChildren(errorBox(error));
    }
  });
  return h("div", { class: "correct" }, button, place);
}

/**
 * @param {string} task
 * @param {AnsweredPhoto} photo
 * @param {boolean} taught
 * @param {() => Promise<void>} corrected
 * @param {HTMLElement} errors shows error messages
 * @returns {Save}
 */
function saver(task, photo, taught, corrected, errors) {
  const undo = async (/** @type {number} */ version) => {
    try {
      await takeBack(task, version);
      await corrected();
    } catch (error) {
      note(error instanceof Error ? error.message : String(error));
    }
  };
  return async (labels) => {
    errors.replaceChildren();
    try {
      const done = await correct(task, { ...photo, labels }, taught);
      const what = labels.join(" and ") || "none of its classes";
      if (!taught) note(`Correction stored for the next training of ${task}: ${what}.`);
      else if (!done.created) note(`${task} already has this example: ${what}.`);
      else
        note(`${task} version ${done.version} is served with this example: ${what}.`, {
          label: "Undo",
          run: () => undo(done.version),
        });
      if (taught) await corrected();
    } catch (error) {
      errors.replaceChildren(errorBox(error));
    }
  };
}

/**
 * Buttons for a single-label task, checkboxes for a multi-label task.
 * @param {any} manifest
 * @param {string[]} answered
 * @param {Save} save
 */
export function choices(manifest, answered, save) {
  /** @type {string[]} */
  const labels = manifest.labels ?? [];
  const offered = labels.length <= BUTTONS ? labels : answered;
  const several = manifest.task_type === "multi_label";
  const named = offered.map((label) => (several ? tick(label, answered) : choice(label, save)));
  const list = `classes-${++count}`;
  const input = /** @type {HTMLInputElement} */ (
    h("input", { list, autocomplete: "off", maxlength: 256, required: !several })
  );
  const submit = /** @type {HTMLButtonElement} */ (h("button", { type: "submit" }, "Correct it"));
  const send = (/** @type {Event} */ event) => {
    event.preventDefault();
    const ticked = [...form.querySelectorAll("input:checked")].map((box) => box.getAttribute("value"));
    const labels = [...ticked, input.value.trim()].filter((label) => label);
    if (labels.length || several) busy(submit, () => save(/** @type {string[]} */ (labels)));
  };
  const form = h(
    "form",
    { class: "choices", onsubmit: send },
    h("div", { class: "chips", role: "group", "aria-label": "This is" }, ...named),
    h(
      "div",
      { class: "row" },
      h("label", { class: "grow" }, offered.length ? (several ? "and also" : "or another class") : "Class", input),
      submit,
    ),
    h("datalist", { id: list }, ...labels.map((label) => h("option", { value: label }))),
    h("p", { class: "hint" }, outcome(isTaught(manifest))),
  );
  return form;
}

/** @param {boolean} taught */
function outcome(taught) {
  return taught
    ? "The photo becomes an example, and a new version is served at once."
    : "Stored for the next training of this task. Its answers do not change until then.";
}

/**
 * @param {string} label
 * @param {Save} save
 */
function choice(label, save) {
  const button = /** @type {HTMLButtonElement} */ (h("button", { type: "button" }, label));
  button.addEventListener("click", () => busy(button, () => save([label])));
  return button;
}

/**
 * @param {string} label
 * @param {string[]} answered
 */
function tick(label, answered) {
  const box = { type: "checkbox", value: label, checked: answered.includes(label) };
  return h("label", { class: "tick" }, h("input", box), label);
}
