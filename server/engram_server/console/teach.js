// @ts-check
/** The Teach page: photos into classes, a task, and trying it on new photos. */

import { Problem, TASK_NAME } from "./api.js";
import { Board } from "./classes.js";
import { UnreadablePhotos, examplesOf, fetchPictures, forget, takeBack, teach } from "./examples.js";
import { nameOf } from "./photos.js";
import { folderPicker, takeDrops } from "./picker.js";
import { confusions, labelIssues, named, summary } from "./review.js";
import { Trial } from "./trial.js";
import { busy, byId, h, note, plural, errorBox } from "./ui.js";

/** @typedef {import("./examples.js").Taught} Taught */

const name = /** @type {HTMLInputElement} */ (byId("teach-task"));
const kind = /** @type {HTMLFieldSetElement} */ (byId("teach-kind"));
const go = /** @type {HTMLButtonElement} */ (byId("teach"));
const readNames = /** @type {HTMLInputElement} */ (byId("read-names"));
const template = /** @type {HTMLInputElement} */ (byId("name-template"));
const noPicturesKept = /** @type {HTMLInputElement} */ (byId("no-pictures"));
const board = new Board(byId("class-list"), removeExample);
const trial = new Trial(() => name.value.trim(), lookUp);

/** @type {Taught | null} The example set of the task; null for a new task. */
let taught = null;
/** @type {string} Why the task cannot be taught. */
let nameError = "";
/** Number of the latest lookup; older ones are ignored. */
let turn = 0;

export function start() {
  name.addEventListener("change", () => lookUp());
  kind.addEventListener("change", () => board.allowSeveral(chosenKind() === "multi_label"));
  byId("add-class").addEventListener("click", () => board.add().focus());
  byId("add-class").after(...folderPicker("Add a folder", addFolders));
  byId("another").addEventListener("click", startAnother);
  go.addEventListener("click", () => busy(go, teachAll));
  board.add();
  board.add();
  takeDrops(byId("teach-form"), (_, found) => addFolders(found));
  byId("teach-result").after(trial.element);
  showResult();
}

/**
 * Show the task in the address; without one, keep the current form.
 * @param {string | null} task
 */
export function open(task) {
  if (task !== null) name.value = task;
  if (name.value.trim()) lookUp();
}

/**
 * Class names need a backbone with a text tower.
 * @param {boolean} reads
 */
export function offerNames(reads) {
  byId("teach-names").hidden = !reads;
  if (!reads) readNames.checked = false;
}

/**
 * Add dropped or pasted files to the focused class.
 * @param {File[]} files
 */
export function take(files) {
  const column = board.focused();
  if (column) column.read(files);
  else note("Drop photos onto a class, or onto the box for trying a photo.");
}

/** @param {import("./picker.js").Found[]} found */
function addFolders(found) {
  const inFolders = found.filter(({ folders }) => folders.length);
  board.addFolders(inFolders);
  const alone = found.length - inFolders.length;
  if (alone || !found.length) take(alone ? found.map(({ file }) => file) : []);
}

function startAnother() {
  name.value = "";
  board.clear();
  board.add();
  board.add();
  lookUp();
  history.replaceState(null, "", "#teach");
  name.focus();
}

// The task

async function lookUp() {
  const mine = ++turn;
  const task = name.value.trim();
  let found = null;
  let reason = task ? "" : "Enter a name for the task.";
  if (task && !TASK_NAME.test(task)) {
    reason =
      "A name has lower-case letters, digits and ._-, an optional team/ prefix, and starts with a letter or digit.";
  } else if (task) {
    try {
      found = await examplesOf(task);
    } catch (error) {
      reason = error instanceof Problem ? whyNot(task, error) : String(error);
    }
  }
  if (mine !== turn) return;
  [taught, nameError] = [found, reason];
  showKind(found);
  board.show(found, chosenKind() === "multi_label");
  showTask(task);
  showResult();
}

/** The task type: a choice for new tasks, fixed afterwards. */
function chosenKind() {
  return /** @type {HTMLInputElement} */ (kind.querySelector(":checked")).value;
}

/** @param {Taught | null} found */
function showKind(found) {
  kind.disabled = found !== null;
  if (!found) return;
  const chosen = kind.querySelector(`[value="${found.task_type}"]`);
  /** @type {HTMLInputElement} */ (chosen).checked = true;
}

/**
 * @param {string} task
 * @param {Problem} problem
 */
function whyNot(task, problem) {
  return problem.type === "urn:engram:problem:not-taught"
    ? `${task} is a trained task: choose another name. You can correct it on the Ask page.`
    : `${problem.title}: ${problem.detail}`;
}

/** @param {string} task */
function showTask(task) {
  const hint = byId("teach-task-hint");
  hint.toggleAttribute("data-rejected", Boolean(task && nameError));
  name.setAttribute("aria-invalid", String(Boolean(task && nameError)));
  byId("another").hidden = taught === null;
  if (!task) hint.textContent = "Lower-case letters and digits, for example rust or team/rust.";
  else if (nameError) hint.textContent = nameError;
  else if (taught === null) hint.textContent = "A new task.";
  else
    hint.textContent = `${task} has ${plural(taught.examples.length, "example")}. New photos are added.`;
}

// Teaching

async function teachAll() {
  const errors = byId("teach-errors");
  errors.replaceChildren();
  await board.settled();
  await lookUp();
  if (nameError) {
    showRefusal();
    return;
  }
  const wrong = board.check(taught === null, readNames.checked);
  if (wrong) {
    errors.replaceChildren(sentence(wrong));
    return;
  }
  if (board.unreadable().length) {
    showUnreadable();
    return;
  }
  const task = name.value.trim();
  const photos = board.photos();
  const progress = showProgress(photos.length);
  try {
    const newKind = taught === null ? chosenKind() : undefined;
    const classes = readNames.checked ? board.names() : [];
    const templates = template.value.trim() ? [template.value.trim()] : [];
    const options = { newKind, sent: progress, classes, templates, keepPictures: !noPicturesKept.checked };
    const done = await teach(task, photos, options);
    board.taught();
    note(`${task} version ${done.version} is being served.`);
    history.replaceState(null, "", `#teach/${encodeURIComponent(task)}`);
  } catch (error) {
    if (error instanceof UnreadablePhotos) {
      board.markUnreadable(error.reasons);
      showUnreadable();
    } else errors.replaceChildren(errorBox(error));
  }
  byId("teach-progress").replaceChildren();
  await lookUp();
}

/** List the photos that cannot be read, and offer to teach the others. */
function showUnreadable() {
  const photos = board.unreadable();
  const rest = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: "primary", id: "teach-rest" }, "Teach without these")
  );
  rest.addEventListener("click", () =>
    busy(rest, async () => {
      board.dropUnreadable();
      await teachAll();
    }),
  );
  byId("teach-errors").replaceChildren(
    h(
      "div",
      { class: "problem", role: "alert" },
      h("p", { class: "problem-title" }, `${plural(photos.length, "photo")} cannot be read. Nothing was taught.`),
      h("ul", { class: "unreadable" }, ...photos.map(({ digest, reason }) => h("li", {}, h("b", {}, nameOf(digest)), `: ${reason}`))),
      rest,
    ),
  );
}

function showRefusal() {
  const hint = byId("teach-task-hint");
  hint.textContent = nameError;
  hint.setAttribute("data-rejected", "");
  name.setAttribute("aria-invalid", "true");
  name.focus();
}

/** @param {string} text */
function sentence(text) {
  return h("p", { class: "problem", role: "alert" }, text);
}

/**
 * @param {number} total
 * @returns {(photos: number) => void} called with the number of photos that have arrived
 */
function showProgress(total) {
  let done = 0;
  const bar = h("progress", { max: total || 1, value: 0, "aria-label": "Photos sent" });
  const what = total ? `Teaching ${plural(total, "photo")}…` : "Reading the class names…";
  const text = h("span", { role: "status" }, what);
  byId("teach-progress").replaceChildren(bar, text);
  return (photos) => {
    done += photos;
    bar.setAttribute("value", String(done));
    text.textContent = done < total ? `${done} of ${plural(total, "photo")} sent…` : "Solving and publishing…";
  };
}

/**
 * Change the example set, show a message and reload.
 * @param {() => Promise<any>} change
 * @param {string} what
 */
async function makeChange(change, what) {
  const errors = byId("teach-errors");
  const task = name.value.trim();
  errors.replaceChildren();
  try {
    const { version } = await change();
    note(`${what} ${task} version ${version} is being served.`, {
      label: "Undo",
      run: () => undo(task, version),
    });
  } catch (error) {
    errors.replaceChildren(errorBox(error));
  }
  await lookUp();
}

/**
 * @param {string} task
 * @param {number} version
 */
async function undo(task, version) {
  try {
    await takeBack(task, version);
    note(`Version ${version} of ${task} is undone.`);
  } catch (error) {
    byId("teach-errors").replaceChildren(errorBox(error));
  }
  if (name.value.trim() === task) await lookUp();
}

/** @param {string} digest */
function removeExample(digest) {
  return makeChange(() => forget(name.value.trim(), digest), `${nameOf(digest)} is removed.`);
}

// Result

function showResult() {
  trial.show(taught !== null);
  const [result, review] = [byId("teach-result"), byId("teach-review")];
  if (taught === null) {
    result.replaceChildren(invitation());
    review.replaceChildren();
    return;
  }
  const task = name.value.trim();
  const { version } = taught;
  const show = (/** @type {string[]} */ digests) => fetchPictures(task, version, digests).catch(noPictures);
  const move = (/** @type {import("./review.js").Suspect} */ { digest, suggested }) =>
    makeChange(
      () => teach(task, [{ digest, labels: suggested }]),
      `${nameOf(digest)} is ${named(suggested)} now.`,
    );
  const actions = { show, move, remove: removeExample };
  result.replaceChildren(summary(task, taught));
  review.replaceChildren(...labelIssues(taught, actions), ...confusions(taught, actions));
  show([...taught.label_issues.map(({ digest }) => digest), ...board.shown()]);
}

/** @param {unknown} error */
function noPictures(error) {
  note(`The pictures cannot be shown. ${error instanceof Error ? error.message : error}`);
}

function invitation() {
  const steps = [
    ["Name the task", "and two or more classes."],
    ["Add photos", "of each class. Five per class are a good start; one is enough to begin."],
    ["Teach.", "The task is served at once, with its estimated accuracy, and improves with every correction."],
  ];
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "lead" }, "A task in a minute"),
    h(
      "ol",
      { class: "steps" },
      ...steps.map(([what, more]) => h("li", {}, h("b", {}, what), ` ${more}`)),
    ),
    h(
      "p",
      { class: "hint" },
      "The server stores the features of the photos, small pictures and file names, not the photos.",
    ),
  );
}
