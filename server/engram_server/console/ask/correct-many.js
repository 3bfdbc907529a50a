// @ts-check
/** Correct several photos at once. */

import { json, taskPath } from "../api.js";
import { choices } from "../correct.js";
import { correct, isTaught, takeBack, teach } from "../examples.js";
import { choice, errorBox, h, note, plural } from "../ui.js";
import { tasksOf } from "./rows.js";

/** @typedef {import("./photo.js").Photo} Photo */

/**
 * A panel: which task, and what the photos show.
 * @param {Photo[]} photos
 * @param {string} preferred the task to begin with; empty for the first
 * @param {(photos: Photo[]) => Promise<void>} again predicts again
 */
export function correctMany(photos, preferred, again) {
  const answered = photos.filter((photo) => photo.result);
  const refs = tasksOf(answered).filter((ref) => isCorrectable(answered, ref));
  const names = [...new Set(refs.map((ref) => ref.split(/[@:]/, 1)[0]))];
  if (!names.length) return h("p", { class: "hint" }, "None of these tasks can be corrected.");
  const place = h("div", {});
  const panel = h("div", { class: "panel" });
  let chosen = "";
  const show = async (/** @type {string} */ task) => {
    chosen = task;
    try {
      const { version } = await json(taskPath(task));
      const manifest = await json(taskPath(task, `versions/${version}/manifest`));
      if (task !== chosen) return; // the classes of a task that was chosen before came later
      const save = saver(task, answered, isTaught(manifest), again, panel);
      place.replaceChildren(choices(manifest, [], save));
    } catch (error) {
      place.replaceChildren(errorBox(error));
    }
  };
  const first = names.includes(preferred) ? preferred : names[0];
  panel.append(
    h("h2", {}, `Correct ${plural(answered.length, "photo")}`),
    choice("Task to correct", names.map((name) => [name, name]), first, show),
    place,
  );
  show(first);
  return panel;
}

/**
 * @param {Photo[]} photos
 * @param {string} ref
 */
function isCorrectable(photos, ref) {
  return photos.some(({ result }) => {
    const answer = result?.tasks[ref];
    return answer?.predictions && answer.version !== null;
  });
}

/**
 * @param {string} task
 * @param {Photo[]} photos
 * @param {boolean} taught
 * @param {(photos: Photo[]) => Promise<void>} again
 * @param {HTMLElement} panel
 * @returns {(labels: string[]) => Promise<void>}
 */
function saver(task, photos, taught, again, panel) {
  return async (labels) => {
    const what = labels.join(" and ") || "none of its classes";
    const many = plural(photos.length, "photo");
    try {
      const done = await send(task, photos, labels, taught);
      panel.replaceChildren();
      panel.remove();
      if (!taught) note(`Corrections of ${many} stored for the next training of ${task}: ${what}.`);
      else if (!done.created) note(`${task} already has these examples: ${what}.`);
      else
        note(`${task} version ${done.version} is served with ${many} as ${what}.`, {
          label: "Undo",
          run: () => undo(task, done.version, photos, again),
        });
      if (taught) await again(photos);
    } catch (error) {
      panel.querySelector(".problem")?.remove();
      panel.append(errorBox(error));
    }
  };
}

/**
 * @param {string} task
 * @param {Photo[]} photos
 * @param {string[]} labels
 * @param {boolean} taught
 */
async function send(task, photos, labels, taught) {
  const examples = [];
  for (const photo of photos) examples.push({ digest: photo.digest, labels, file: await photo.open() });
  if (taught) return teach(task, examples);
  for (const example of examples) await correct(task, example, false);
  return null;
}

/**
 * @param {string} task
 * @param {number} version
 * @param {Photo[]} photos
 * @param {(photos: Photo[]) => Promise<void>} again
 */
async function undo(task, version, photos, again) {
  try {
    await takeBack(task, version);
    await again(photos);
  } catch (error) {
    note(error instanceof Error ? error.message : String(error));
  }
}
