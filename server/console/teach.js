// @ts-check
/** The page that teaches: photos into classes, a task out, and trying it on the next photo. */

import { Problem, TASK_NAME, json } from "./api.js";
import { said } from "./answer.js";
import { Board } from "./classes.js";
import { correction } from "./correct.js";
import { examplesOf, forget, takeBack, teach } from "./examples.js";
import { decode, look, nameOf, thumbnail } from "./photos.js";
import { picker, takeDrops } from "./picker.js";
import { busy, byId, h, note, percent, plural, problemBox } from "./ui.js";

/** @typedef {import("./examples.js").Taught} Taught */

const name = /** @type {HTMLInputElement} */ (byId("lesson-task"));
const kind = /** @type {HTMLFieldSetElement} */ (byId("lesson-kind"));
const go = /** @type {HTMLButtonElement} */ (byId("teach"));
const readNames = /** @type {HTMLInputElement} */ (byId("read-names"));
const template = /** @type {HTMLInputElement} */ (byId("name-template"));
const board = new Board(byId("class-list"), takeAway);

/** @type {Taught | null} What the named task was taught from; null for a new one. */
let taught = null;
/** @type {string} Why the name cannot be taught. */
let refusal = "";
/** Counts questions what the name stands for: only the newest is of interest. */
let turn = 0;
/** The task that was tried. */
let triedTask = "";

export function start() {
  name.addEventListener("change", () => lookUp());
  kind.addEventListener("change", () => board.allowSeveral(chosenKind() === "multi_label"));
  byId("add-class").addEventListener("click", () => board.add().focus());
  byId("another").addEventListener("click", startAnother);
  go.addEventListener("click", () => busy(go, teachAll));
  board.add();
  board.add();
  byId("lesson-result").after(trial);
  showResult();
}

/**
 * What the address names is shown; without a name, whatever was begun stays.
 * @param {string | null} task
 */
export function open(task) {
  if (task !== null) name.value = task;
  if (name.value.trim()) lookUp();
}

/**
 * Names of classes teach only where the backbone has a text tower: elsewhere nobody is asked.
 * @param {boolean} reads
 */
export function offerNames(reads) {
  byId("lesson-names").hidden = !reads;
  if (!reads) readNames.checked = false;
}

/**
 * Files that came without a place: they go to the class that has the focus.
 * @param {File[]} files
 */
export function take(files) {
  const column = board.focused();
  if (column) column.read(files);
  else note("Drop photos onto a class, or onto the box that tries the next photo.");
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
  let reason = task ? "" : "Give the task a name.";
  if (task && !TASK_NAME.test(task)) {
    reason =
      "A name has small letters, digits and ._-, at most one team/ in front, and starts with a letter or digit.";
  } else if (task) {
    try {
      found = await examplesOf(task);
    } catch (error) {
      reason = error instanceof Problem ? whyNot(task, error) : String(error);
    }
  }
  if (mine !== turn) return;
  [taught, refusal] = [found, reason];
  showKind(found);
  board.show(found, chosenKind() === "multi_label");
  if (triedTask !== task) tried.replaceChildren();
  showTask(task);
  showResult();
}

/** Whether a photo has one label or several: a new task's choice, and then settled. */
function chosenKind() {
  return /** @type {HTMLInputElement} */ (kind.querySelector(":checked")).value;
}

/** @param {Taught | null} found */
function showKind(found) {
  kind.disabled = found !== null;
  if (!found) return;
  const chosen = kind.querySelector(`[value="${found.problem}"]`);
  /** @type {HTMLInputElement} */ (chosen).checked = true;
}

/**
 * @param {string} task
 * @param {Problem} problem
 */
function whyNot(task, problem) {
  return problem.type === "urn:engram:problem:not-taught"
    ? `${task} was trained, not taught: choose another name. It can be corrected where you ask it.`
    : `${problem.title}: ${problem.detail}`;
}

/** @param {string} task */
function showTask(task) {
  const hint = byId("lesson-task-hint");
  hint.toggleAttribute("data-refused", Boolean(task && refusal));
  name.setAttribute("aria-invalid", String(Boolean(task && refusal)));
  byId("another").hidden = taught === null;
  if (!task) hint.textContent = "Small letters and digits, as in rust or team/rust.";
  else if (refusal) hint.textContent = refusal;
  else if (taught === null) hint.textContent = "A new task.";
  else
    hint.textContent = `${task} has ${plural(taught.examples.length, "example")}. What you add is taught on top.`;
}

// Teaching

async function teachAll() {
  const trouble = byId("lesson-problem");
  trouble.replaceChildren();
  await board.settled();
  await lookUp();
  if (refusal) {
    showRefusal();
    return;
  }
  const wrong = board.check(taught === null, readNames.checked);
  if (wrong) {
    trouble.replaceChildren(sentence(wrong));
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
    trouble.replaceChildren(problemBox(error));
  }
  byId("lesson-progress").replaceChildren();
  await lookUp();
}

function showRefusal() {
  const hint = byId("lesson-task-hint");
  hint.textContent = refusal;
  hint.setAttribute("data-refused", "");
  name.setAttribute("aria-invalid", "true");
  name.focus();
}

/** @param {string} text */
function sentence(text) {
  return h("p", { class: "problem", role: "alert" }, text);
}

/**
 * @param {number} total
 * @returns {(photos: import("./examples.js").Photo[]) => void} to be told what is taught
 */
function showProgress(total) {
  let done = 0;
  const bar = h("progress", { max: total, value: 0, "aria-label": "Photos taught" });
  const text = h("span", { role: "status" }, `Teaching ${plural(total, "photo")}…`);
  byId("lesson-progress").replaceChildren(bar, text);
  return (photos) => {
    done += photos.length;
    board.taught(photos);
    bar.setAttribute("value", String(done));
    text.textContent = `${done} of ${plural(total, "photo")} taught…`;
  };
}

/**
 * Make a change to the examples, say what it came to, and show what holds then.
 * @param {() => Promise<any>} change
 * @param {string} what
 */
async function makeChange(change, what) {
  const trouble = byId("lesson-problem");
  const task = name.value.trim();
  trouble.replaceChildren();
  try {
    const { version } = await change();
    note(`${what} ${task} version ${version} is being served.`, {
      label: "Undo",
      run: () => undo(task, version),
    });
  } catch (error) {
    trouble.replaceChildren(problemBox(error));
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
    note(`${task} is as it was before version ${version}.`);
  } catch (error) {
    byId("lesson-problem").replaceChildren(problemBox(error));
  }
  if (name.value.trim() === task) await lookUp();
}

/** @param {string} digest */
function takeAway(digest) {
  return makeChange(() => forget(name.value.trim(), digest), `${nameOf(digest)} is taken away.`);
}

// What came of it

function showResult() {
  // What was tried stays, and the focus in it: it is hidden, never taken out and put back.
  trial.hidden = taught === null;
  const doubtful = taught?.doubtful.length ? [doubts(taught.doubtful)] : [];
  byId("lesson-result").replaceChildren(
    ...(taught ? [summary(taught), ...doubtful] : [invitation()]),
  );
}

function invitation() {
  const steps = [
    ["Name it", "and name two classes or more: what its answers will be."],
    ["Give photos", "of each. Five a class are a good start, one is enough to begin."],
    ["Teach.", "It is served at once, says how good it is, and learns from every correction."],
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
    h("p", { class: "hint" }, "Only what the model sees in the photos is kept, not the photos."),
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
      ? h("p", { class: "headline" }, h("strong", {}, percent(judged.accuracy)), " named right")
      : h("p", {}, "Give a class a second photo, and this says how good the task is."),
    judged &&
      h(
        "p",
        { class: "hint" },
        "Measured by hiding each photo in turn and asking a task made of all others. On new photos like these, " +
          `expect between ${whole(judged.low)} and ${whole(judged.high)} % right; more photos narrow it down.`,
      ),
    h(
      "p",
      {},
      h("a", { href: `#tasks/${encodeURIComponent(task)}` }, "Its versions and history"),
    ),
  );
}

/** @param {number} share */
function whole(share) {
  return Math.round(100 * share);
}

/** @param {import("./examples.js").Doubt[]} doubtful */
function doubts(doubtful) {
  return h(
    "section",
    { class: "panel", "aria-labelledby": "doubts-title" },
    h("h2", { id: "doubts-title" }, "Are these in the right class?"),
    h("ul", { class: "doubts" }, ...doubtful.map(doubt)),
  );
}

/**
 * @param {import("./examples.js").Doubt} each
 * @param {number} at
 */
function doubt({ digest, labels, suggested }, at) {
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
        action("Take it away", `Take ${nameOf(digest)} away`, () => takeAway(digest), at),
      ),
    ),
  );
}

/**
 * @param {string} text
 * @param {string} label what a screen reader says
 * @param {() => Promise<void>} run
 * @param {number} at the place of its doubt
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
 * All doubts have been drawn anew, and the focus was lost with the old ones: it goes to the one that
 * took this place, or else to what comes next.
 * @param {number} at
 */
function goOnAt(at) {
  if (document.activeElement !== document.body) return;
  const left = document.querySelectorAll(".doubts li");
  const next = left[Math.min(at, left.length - 1)] ?? (trial.hidden ? null : trial);
  (next?.querySelector("button") ?? go).focus();
}

// Trying it

const tried = h("div", { class: "tried", "aria-live": "polite" });
const trial = h(
  "section",
  { class: "panel trial", id: "trial", "aria-labelledby": "trial-title" },
  h("h2", { id: "trial-title" }, "Try the next photo"),
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
  tried.replaceChildren(h("p", { class: "waiting" }, "Asking…"));
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
      const text = h("div", { class: "grow" }, ...said(found));
      const known = found.known === false && "false";
      const card = h("article", { class: "card", "data-task": task, "data-known": known });
      card.append(...(shown ? [shown.canvas] : []), text);
      text.append(correction(task, found, { file, digest }, again) ?? "");
      tried.replaceChildren(card);
    } catch (error) {
      tried.replaceChildren(problemBox(error));
    }
  };
  await askAgain();
}
