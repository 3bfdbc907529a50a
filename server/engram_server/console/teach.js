// @ts-check
/** The Teach page: photos into classes, a task, and trying it on new photos. */

import { Problem, TASK_NAME, json } from "./api.js";
import { renderAnswer } from "./answer.js";
import { Board } from "./classes.js";
import { correction } from "./correct.js";
import { examplesOf, forget, takeBack, teach } from "./examples.js";
import { decode, look, nameOf, thumbnail } from "./photos.js";
import { picker, takeDrops } from "./picker.js";
import { busy, byId, h, note, percent, plural, errorBox } from "./ui.js";

/** @typedef {import("./examples.js").Taught} Taught */

const name = /** @type {HTMLInputElement} */ (byId("teach-task"));
const kind = /** @type {HTMLFieldSetElement} */ (byId("teach-kind"));
const go = /** @type {HTMLButtonElement} */ (byId("teach"));
const readNames = /** @type {HTMLInputElement} */ (byId("read-names"));
const template = /** @type {HTMLInputElement} */ (byId("name-template"));
const board = new Board(byId("class-list"), removeExample);

/** @type {Taught | null} The example set of the task; null for a new task. */
let taught = null;
/** @type {string} Why the task cannot be taught. */
let nameError = "";
/** Number of the latest lookup; older ones are ignored. */
let turn = 0;
/** The task of the last trial. */
let triedTask = "";

export function start() {
  name.addEventListener("change", () => lookUp());
  kind.addEventListener("change", () => board.allowSeveral(chosenKind() === "multi_label"));
  byId("add-class").addEventListener("click", () => board.add().focus());
  byId("another").addEventListener("click", startAnother);
  go.addEventListener("click", () => busy(go, teachAll));
  board.add();
  board.add();
  byId("teach-result").after(trial);
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
  if (triedTask !== task) tried.replaceChildren();
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
  const task = name.value.trim();
  const photos = board.photos();
  const progress = showProgress(photos.length);
  try {
    const newKind = taught === null ? chosenKind() : undefined;
    const classes = readNames.checked ? board.names() : [];
    const templates = template.value.trim() ? [template.value.trim()] : [];
    const options = { newKind, taught: progress, classes, templates };
    const done = await teach(task, photos, options);
    note(`${task} version ${done.version} is being served.`);
    history.replaceState(null, "", `#teach/${encodeURIComponent(task)}`);
  } catch (error) {
    errors.replaceChildren(errorBox(error));
  }
  byId("teach-progress").replaceChildren();
  await lookUp();
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
 * @returns {(photos: import("./examples.js").Photo[]) => void} called with the photos that are taught
 */
function showProgress(total) {
  let done = 0;
  const bar = h("progress", { max: total || 1, value: 0, "aria-label": "Photos taught" });
  const what = total ? `Teaching ${plural(total, "photo")}…` : "Reading the class names…";
  const text = h("span", { role: "status" }, what);
  byId("teach-progress").replaceChildren(bar, text);
  return (photos) => {
    done += photos.length;
    board.taught(photos);
    bar.setAttribute("value", String(done));
    text.textContent = `${done} of ${plural(total, "photo")} taught…`;
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
  // The trial is hidden, not removed, so that it keeps the focus.
  trial.hidden = taught === null;
  const issues = taught?.label_issues.length ? [labelIssues(taught.label_issues)] : [];
  byId("teach-result").replaceChildren(
    ...(taught ? [summary(taught), ...issues] : [invitation()]),
  );
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
    h("p", { class: "hint" }, "Only the features of the photos are stored, not the photos."),
  );
}

/** @param {Taught} found */
function summary(found) {
  const task = name.value.trim();
  const judged = found.leave_one_out;
  return h(
    "section",
    { class: "panel version", "aria-labelledby": "taught-title" },
    h(
      "header",
      {},
      h("h2", { id: "taught-title" }, task),
      h("span", { class: "tag" }, `version ${found.version}`),
      h("span", { class: "badge", "data-state": "ready" }, "Served"),
    ),
    judged
      ? h("p", { class: "headline" }, h("strong", {}, percent(judged.accuracy)), " leave-one-out accuracy")
      : h("p", {}, "Add a second photo to a class to see the accuracy."),
    judged &&
      h(
        "p",
        { class: "hint" },
        "Each photo is classified by a model trained on all others. On similar new photos, expect " +
          `${whole(judged.low)} to ${whole(judged.high)} % (95 % interval); more photos narrow it.`,
      ),
    h(
      "p",
      {},
      h("a", { href: `#tasks/${encodeURIComponent(task)}` }, "Versions and history"),
    ),
  );
}

/** @param {number} share */
function whole(share) {
  return Math.round(100 * share);
}

/** @param {import("./examples.js").LabelIssue[]} issues */
function labelIssues(issues) {
  return h(
    "section",
    { class: "panel", "aria-labelledby": "label-issues-title" },
    h("h2", { id: "label-issues-title" }, "Suspected label errors"),
    h("ul", { class: "label-issues" }, ...issues.map(labelIssue)),
  );
}

/**
 * @param {import("./examples.js").LabelIssue} each
 * @param {number} at
 */
function labelIssue({ digest, labels, suggested }, at) {
  const called = (/** @type {string[]} */ some) => some.join(" and ") || "nothing";
  const task = name.value.trim();
  const move = () =>
    makeChange(
      () => teach(task, [{ digest, labels: suggested }]),
      `${nameOf(digest)} is ${called(suggested)} now.`,
    );
  return h(
    "li",
    {},
    thumbnail(digest),
    h(
      "div",
      {},
      h("p", {}, "In ", h("b", {}, called(labels)), ", looks like ", h("b", {}, called(suggested))),
      h(
        "div",
        { class: "actions" },
        action(`Move to ${called(suggested)}`, `Move ${nameOf(digest)} to ${called(suggested)}`, move, at),
        action("Remove", `Remove ${nameOf(digest)}`, () => removeExample(digest), at),
      ),
    ),
  );
}

/**
 * @param {string} text
 * @param {string} label what a screen reader says
 * @param {() => Promise<void>} run
 * @param {number} at its position in the list
 */
function action(text, label, run, at) {
  const button = /** @type {HTMLButtonElement} */ (
    h("button", { type: "button", class: "quiet", "aria-label": label }, text)
  );
  button.addEventListener("click", async () => {
    await busy(button, run);
    goOnAt(at);
  });
  return button;
}

/**
 * The list was rendered again and lost the focus: move it to the entry at this position, or to what
 * comes next.
 * @param {number} at
 */
function goOnAt(at) {
  if (document.activeElement !== document.body) return;
  const left = document.querySelectorAll(".label-issues li");
  const next = left[Math.min(at, left.length - 1)] ?? (trial.hidden ? null : trial);
  (next?.querySelector("button") ?? go).focus();
}

// Trial

const tried = h("div", { class: "tried", "aria-live": "polite" });
const trial = h(
  "section",
  { class: "panel trial", id: "trial", "aria-labelledby": "trial-title" },
  h("h2", { id: "trial-title" }, "Try a photo"),
  h("div", { class: "actions" }, ...picker({ what: "a photo", several: false, take: tryOut })),
  h("p", { class: "hint droppable" }, "or drop it here."),
  tried,
);
takeDrops(trial, tryOut);

/** @param {File[]} files */
async function tryOut([file]) {
  if (!file) return;
  const task = name.value.trim();
  triedTask = task;
  tried.replaceChildren(h("p", { class: "waiting" }, "Predicting…"));
  const [digest, shown] = [await look(file), await decode(file)];
  const askAgain = async () => {
    try {
      const query = new URLSearchParams({ tasks: task });
      const answer = await json(`predict?${query}`, {
        method: "POST",
        body: file,
        headers: { "Content-Type": "application/octet-stream" },
      });
      const found = answer.images[0].tasks[task];
      const again = async () => {
        await Promise.all([askAgain(), lookUp()]);
        if (document.activeElement === document.body)
          /** @type {HTMLElement | null} */ (tried.querySelector(".correct button"))?.focus();
      };
      shown?.canvas.setAttribute("role", "img");
      shown?.canvas.setAttribute("aria-label", file.name);
      const text = h("div", { class: "grow" }, ...renderAnswer(found));
      const inDistribution = found.in_distribution === false && "false";
      const card = h("article", { class: "card", "data-task": task, "data-in-distribution": inDistribution });
      card.append(...(shown ? [shown.canvas] : []), text);
      text.append(correction(task, found, { file, digest }, again) ?? "");
      tried.replaceChildren(card);
    } catch (error) {
      tried.replaceChildren(errorBox(error));
    }
  };
  await askAgain();
}
