// @ts-check
/** The Ask page: one photo with the answers of all tasks, or a table of answers for many photos. */

import { request } from "../api.js";
import { hasOwnCamera, takePicture } from "../camera.js";
import { decode, remember } from "../photos.js";
import { sourcesOf } from "../sources.js";
import { busy, byId, errorBox, h, plural } from "../ui.js";
import { answerCards, facts, spoken } from "./answers.js";
import { Photos } from "./photo.js";
import { showPicture, strip } from "./picture.js";
import { sampleButtons } from "./samples.js";
import { sendAll } from "./sending.js";
import { Table } from "./table.js";
import { TaskPicker } from "./task-picker.js";

/** @typedef {import("./photo.js").Photo} Photo */

const STACKED = window.matchMedia("(max-width: 860px)"); // the answers are below the photo

const photos = new Photos();
/** @type {{photo: Photo, file: File | null, shown: import("../heatmap.js").Picture | null} | null} */
let current = null;
/** The tasks that a sample filled in; removed for the user's own images. */
let filledIn = "";
/** @type {string | null} The task whose attention is drawn. */
let looking = null;
/** @type {AbortController | null} Stops the photos that are being sent. */
let sending = null;

const again = /** @type {HTMLButtonElement} */ (byId("again"));
const chooser = /** @type {HTMLInputElement} */ (byId("files"));
const folder = /** @type {HTMLInputElement} */ (byId("folder"));
const capture = /** @type {HTMLInputElement} */ (byId("capture"));
const picker = new TaskPicker(/** @type {HTMLInputElement} */ (byId("refs")), () => {});
const table = new Table({ open: openPhoto, remove, again: predictMany });

export function start() {
  byId("choose").addEventListener("click", () => chooser.click());
  byId("choose-folder").addEventListener("click", () => folder.click());
  byId("camera").addEventListener("click", useCamera);
  for (const input of [chooser, folder, capture]) {
    input.addEventListener("change", () => {
      addFiles([...(input.files ?? [])]);
      input.value = "";
    });
  }
  byId("options").addEventListener("submit", (event) => {
    event.preventDefault();
    busy(again, askAgain);
  });
  byId("samples").append(...sampleButtons(addSample).map((button) => h("li", {}, button)));
  showAll();
}

async function useCamera() {
  if (hasOwnCamera()) return capture.click();
  const picture = await takePicture();
  if (picture) addFiles([picture]);
}

/** @param {File[]} files */
export async function addFiles(files) {
  fillIn([]);
  await add(await sourcesOf(files));
}

/**
 * @param {File} file
 * @param {string[]} tasks
 */
async function addSample(file, tasks) {
  fillIn(tasks);
  await add(await sourcesOf([file]));
}

/**
 * Fill in task names, unless the user has chosen some.
 * @param {string[]} tasks
 */
function fillIn(tasks) {
  if (picker.refs.join() !== filledIn) return;
  picker.refs = tasks;
  filledIn = tasks.join();
}

/**
 * One photo is shown large; several go to the table.
 * @param {import("../sources.js").Source[]} sources
 */
async function add(sources) {
  if (!sources.length) return;
  picker.close();
  const before = mode();
  const added = photos.add(sources);
  if (STACKED.matches) /** @type {HTMLDetailsElement} */ (byId("samples-box")).open = false;
  if (added.length === 1 && before !== "table") return openPhoto(added[0]);
  current = null;
  await predictMany(added);
}

/** @param {Set<Photo>} removed */
function remove(removed) {
  photos.remove(removed);
  if (current && removed.has(current.photo)) {
    current = null;
    if (photos.all.length) return openPhoto(photos.all[photos.all.length - 1]);
  }
  showAll();
}

function mode() {
  if (current) return "photo";
  return photos.all.length ? "table" : "empty";
}

function query() {
  const refs = picker.refs;
  return new URLSearchParams(refs.length ? { tasks: refs.join(",") } : {});
}

async function askAgain() {
  if (current) await answer(current.photo);
  else await predictMany(photos.all);
}

function showAll() {
  const shown = mode();
  byId("ask").dataset.mode = shown;
  byId("drop").classList.toggle("small", shown !== "empty");
  byId("invitation").textContent = shown === "empty" ? "Drop photos here" : "Drop more photos here";
  byId("picture").hidden = !current;
  byId("table-area").hidden = shown !== "table";
  byId("answers").hidden = shown === "table";
  again.disabled = shown === "empty";
  if (shown === "table") table.show(photos.all);
  else showAnswers();
  showStrip();
}

// One photo

/** @param {Photo} photo */
async function openPhoto(photo) {
  looking = null;
  current = { photo, file: null, shown: null };
  if (photo.result || photo.problem) showAll();
  try {
    const file = await photo.open();
    const first = await photos.identify(photo, file);
    const shown = await decode(file);
    if (current?.photo !== photo) return;
    current = { photo: first, file, shown };
    photo = first;
  } catch (error) {
    photo.reject(error);
  }
  showAll();
  if (!photo.detail) await answer(photo);
  if (STACKED.matches) byId("picture").scrollIntoView({ block: "start" });
}

/** @param {Photo} photo */
async function answer(photo) {
  if (photo === current?.photo) byId("answers").setAttribute("aria-busy", "true");
  again.disabled = true;
  try {
    const response = await request(`predict?explain=attention&${query()}`, {
      method: "POST",
      body: await photo.open(),
      headers: { "Content-Type": "application/octet-stream" }, // its bytes tell what it is
    });
    photo.detail = await response.json();
    photo.detail.omitted = Number(response.headers.get("X-Tasks-Omitted"));
    photo.accept(photo.detail.images[0]);
  } catch (error) {
    photo.reject(error);
  }
  if (photo !== current?.photo) return;
  remember(photo.digest, photo.shortName, current.shown?.canvas ?? null);
  showAll();
}

function showAnswers() {
  const place = byId("answers");
  place.removeAttribute("aria-busy");
  if (!current) return place.replaceChildren(nothingYet());
  const { photo, file, shown } = current;
  showPicture(photo, shown, looking, () => look(null));
  byId("spoken").textContent = "";
  if (photo.problem) return place.replaceChildren(errorBox(photo.problem));
  const result = photo.detail?.images[0] ?? photo.result;
  if (!result || !file) return place.replaceChildren(h("p", { class: "waiting" }, "Predicting…"));
  /** @type {import("./answers.js").Entry[]} */
  const entries = Object.entries(result.tasks);
  const context = { photo, file, shown, looking, look, corrected };
  place.replaceChildren(...answerCards(entries, context), ...(photo.detail ? [facts(photo.detail)] : []));
  byId("spoken").textContent = spoken(photo.shortName, entries);
}

/**
 * Predict again after a correction and keep the focus.
 * @param {string} task
 */
async function corrected(task) {
  if (!current) return;
  await answer(current.photo);
  const card = document.querySelector(`#answers .card[data-task="${CSS.escape(task)}"]`);
  const button = /** @type {HTMLElement | null} */ (card?.querySelector(".correct button") ?? null);
  if (document.activeElement === document.body) button?.focus({ preventScroll: true });
}

/** @param {string | null} task */
function look(task) {
  looking = looking === task ? null : task;
  if (current) showPicture(current.photo, current.shown, looking, () => look(null));
  for (const button of document.querySelectorAll("#answers .look")) {
    button.setAttribute("aria-pressed", String(button.getAttribute("data-task") === looking));
  }
}

function nothingYet() {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "lead" }, "Every task answers at once"),
    h(
      "p",
      {},
      "Add an image, or use a sample photo. All tasks run in one pass of the model, and each shows its " +
        "attention over the image.",
    ),
  );
}

function showStrip() {
  const several = current !== null && photos.all.length > 1;
  byId("strip").replaceChildren(
    ...(current ? strip(photos.all, current.photo, openPhoto, (photo) => remove(new Set([photo]))) : []),
  );
  const all = byId("all-photos");
  all.hidden = !several;
  all.textContent = `Table of all ${photos.all.length} photos`;
  all.onclick = () => {
    current = null;
    showAll();
    const waiting = photos.all.filter((photo) => !photo.result && !photo.problem);
    if (waiting.length && !sending) predictMany(waiting);
  };
}

// Many photos

/** @param {Photo[]} selected */
async function predictMany(selected) {
  sending?.abort();
  const mine = new AbortController();
  sending = mine;
  let done = 0;
  const showDone = (/** @type {string} */ text) => {
    if (sending === mine) showProgress(text || `${done} of ${plural(selected.length, "photo")} answered`, done / selected.length);
  };
  showAll();
  showDone("");
  byId("table-errors").replaceChildren();
  try {
    await sendAll(selected, query().toString(), {
      signal: mine.signal,
      identify: (photo, file) => photos.identify(photo, file),
      finished: (batch) => {
        done += batch.length;
        showDone("");
        if (mode() === "table") table.show(photos.all);
      },
      busy: showDone,
    });
  } catch (error) {
    mine.abort(); // the other request, too
    if (sending === mine && !(error instanceof DOMException)) byId("table-errors").replaceChildren(errorBox(error));
  }
  if (sending !== mine) return;
  sending = null;
  showOutcome(selected);
  showAll();
}

/**
 * @param {string} text
 * @param {number} share
 */
function showProgress(text, share) {
  const place = byId("table-progress");
  const stop = () => sending?.abort();
  let bar = place.querySelector("progress");
  if (!bar) {
    place.replaceChildren(
      h("progress", { max: 1, "aria-label": "Photos answered" }),
      h("span", { class: "hint" }),
      h("button", { type: "button", onclick: stop }, "Stop"),
    );
    bar = /** @type {HTMLProgressElement} */ (place.querySelector("progress"));
  }
  bar.value = share;
  /** @type {HTMLElement} */ (bar.nextElementSibling).textContent = text;
}

/**
 * What became of the photos, also for screen readers.
 * @param {Photo[]} selected
 */
function showOutcome(selected) {
  const kept = selected.filter((photo) => photos.all.includes(photo));
  const bad = kept.filter((photo) => photo.problem).length;
  const left = kept.filter((photo) => !photo.problem && !photo.result);
  const parts = [
    `${plural(kept.length - bad - left.length, "photo")} answered`,
    bad && `${bad} could not be read`,
    photos.duplicates && `${plural(photos.duplicates, "duplicate")} left out`,
    left.length && `${left.length} not sent`,
  ];
  const text = `${parts.filter(Boolean).join(", ")}.`;
  byId("table-progress").replaceChildren(
    h("p", {}, text),
    ...(left.length
      ? [h("button", { type: "button", onclick: () => predictMany(left) }, "Continue")]
      : []),
  );
  byId("spoken").textContent = text;
}
