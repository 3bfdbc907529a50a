// @ts-check
/** The Ask page: images, the answers of all tasks, and their attention. */

import { OUT_OF_DISTRIBUTION, renderAnswer } from "./answer.js";
import { json } from "./api.js";
import { correction } from "./correct.js";
import { COLOURS, draw, drawSeen } from "./heatmap.js";
import { cover, decode, remember } from "./photos.js";
import { busy, byId, h, milliseconds, percent, plural, errorBox } from "./ui.js";

/**
 * @typedef {import("./answer.js").Answer} Answer
 * @typedef {{file: File, shown: import("./heatmap.js").Picture | null, answer: any,
 *   digest: string, problem: unknown}} Picture
 */

// Name, text, and the demo task with the photo's class.
const SAMPLES = [
  ["cat", "A tabby cat", "cifar10"],
  ["dog", "A German shepherd", "cifar10"],
  ["parrot", "A scarlet macaw", "cifar10"],
  ["horse", "A horse", "cifar10"],
  ["butterfly", "A butterfly", "cifar100"],
  ["flower", "A dahlia", "flowers"],
  ["bee", "A honey bee", "cifar100"],
  ["camel", "A camel", "cifar100"],
  ["castle", "A castle", "cifar100"],
  ["bridge", "A suspension bridge", "cifar100"],
  ["coffee", "A cup of espresso", "cifar100"],
  ["rocket", "A rocket on its pad", "cifar100"],
];
const SMALL = 192; // pixels of a small map's width

/** @type {Picture[]} */
const pictures = [];
/** @type {Picture | null} */
let current = null;
/** The task names that a sample filled in; removed for the user's own images. */
let filledIn = "";
/** @type {string | null} The task whose attention is drawn. */
let looking = null;
let queue = Promise.resolve();

const canvas = /** @type {HTMLCanvasElement} */ (byId("canvas"));
const refs = /** @type {HTMLInputElement} */ (byId("refs"));
const again = /** @type {HTMLButtonElement} */ (byId("again"));
const chooser = /** @type {HTMLInputElement} */ (byId("files"));

export function start() {
  byId("choose").addEventListener("click", () => chooser.click());
  chooser.addEventListener("change", () => {
    addImages([...(chooser.files ?? [])]);
    chooser.value = "";
  });
  byId("options").addEventListener("submit", (event) => {
    event.preventDefault();
    const picture = current;
    if (picture) busy(again, () => answer(picture));
  });
  byId("samples").append(...SAMPLES.map((sample) => h("li", {}, sampleButton(sample))));
  showAnswers();
}

/** @param {File[]} files */
export function addImages(files) {
  fillIn("");
  ask(files);
}

/** @param {File[]} files */
function ask(files) {
  for (const file of files) {
    /** @type {Picture} */
    const picture = { file, shown: null, answer: null, digest: "", problem: null };
    pictures.push(picture);
    // One after the other, in order.
    queue = queue.then(async () => {
      picture.shown = await decode(file);
      if (file === files[0]) show(picture);
      await answer(picture);
    });
  }
}

/** @param {string[]} sample */
function sampleButton([name, text, task]) {
  const address = new URL(`console/samples/${name}.jpg`, document.baseURI);
  const add = async () => {
    const blob = await (await fetch(address)).blob();
    await fillInTasksFor(task);
    ask([new File([blob], `${name}.jpg`, { type: "image/jpeg" })]);
  };
  const image = h("img", { src: address.href, alt: text, width: 72, height: 54, loading: "lazy" });
  return h("button", { type: "button", class: "thumbnail", title: text, onclick: add }, image);
}

/**
 * Fill in the tasks that fit a sample, if they are served.
 * @param {string} task
 */
async function fillInTasksFor(task) {
  const { tasks } = await json("tasks").catch(() => ({ tasks: [] }));
  const ready = tasks.filter((/** @type {any} */ each) => each.status === "ready");
  const names = ready.map((/** @type {any} */ each) => each.task);
  const fitting = ["base", task, "quality"].filter((name) => names.includes(name));
  fillIn(names.includes(task) ? fitting.join(", ") : "");
}

/**
 * Fill in task names, unless the user has typed some.
 * @param {string} text
 */
function fillIn(text) {
  if (refs.value !== filledIn) return;
  refs.value = filledIn = text;
}

/** @param {Picture} picture */
async function answer(picture) {
  picture.problem = null;
  const requested = refs.value
    .split(",")
    .map((ref) => ref.trim())
    .filter(Boolean);
  const query = new URLSearchParams({ explain: "attention" });
  if (requested.length) query.set("tasks", requested.join(","));
  again.disabled = true;
  if (picture === current) byId("answers").setAttribute("aria-busy", "true");
  try {
    picture.answer = await json(`predict?${query}`, {
      method: "POST",
      body: picture.file,
      headers: { "Content-Type": "application/octet-stream" }, // its bytes tell what it is
    });
  } catch (error) {
    picture.answer = null;
    picture.problem = error;
  }
  again.disabled = false;
  const digest = picture.answer?.images[0].digest;
  if (digest) remember(digest, picture.file.name, picture.shown?.canvas ?? null);
  picture.digest = digest ?? picture.digest;
  if (picture === current) {
    showPicture();
    showAnswers();
  }
  showStrip();
}

/** @param {Picture} picture */
function show(picture) {
  current = picture;
  showPicture();
  showAnswers();
  showStrip();
}

// The picture and what is drawn on it

function showPicture() {
  if (!current) return;
  const { file, shown } = current;
  byId("drop").classList.add("small");
  byId("invitation").textContent = "Drop more images here";
  byId("picture").hidden = false;
  canvas.hidden = shown === null;
  byId("no-preview").hidden = shown !== null;
  const selected = looking && current.answer?.images[0].tasks[looking];
  const found = selected?.attention ? selected : null;
  if (shown) {
    [canvas.width, canvas.height] = [shown.canvas.width, shown.canvas.height];
    draw(canvas, shown, found ? found.attention : null, current.answer?.view ?? null);
    const about = found ? `${file.name} with the attention of ${looking}` : file.name;
    canvas.setAttribute("aria-label", about);
  }
  byId("caption").replaceChildren(...caption(file.name, found));
}

/**
 * @param {string} name
 * @param {Answer | null} found
 */
function caption(name, found) {
  if (!found?.attention || !looking) {
    const hint = current?.answer ? "Choose a task to see its attention." : "";
    return [h("span", { class: "file" }, name), h("span", { class: "hint" }, hint)];
  }
  const share = percent(found.attention.on_patches);
  return [
    h("span", {}, "Attention of ", h("b", {}, looking)),
    h("button", { type: "button", class: "quiet", onclick: () => look(null) }, "Hide"),
    h("span", { class: "hint" }, `${share} of the attention is on image patches`),
    legend(),
  ];
}

function legend() {
  const ramp = h("span", { class: "ramp" });
  ramp.style.setProperty("--ramp", COLOURS.join(", "));
  return h("span", { class: "legend hint" }, "less", ramp, "more");
}

/** @param {string | null} task */
function look(task) {
  looking = looking === task ? null : task;
  showPicture();
  for (const button of document.querySelectorAll("#answers .look")) {
    button.setAttribute("aria-pressed", String(button.getAttribute("data-task") === looking));
  }
}

// All pictures

function showStrip() {
  const shown = pictures.filter((picture) => picture.shown || picture.answer || picture.problem);
  const items = shown.length > 1 ? shown.map((picture) => h("li", {}, thumbnail(picture))) : [];
  byId("strip").replaceChildren(...items);
}

/** @param {Picture} picture */
function thumbnail(picture) {
  const attributes = {
    type: "button",
    class: "thumbnail",
    "aria-label": picture.problem ? `${picture.file.name}, rejected` : picture.file.name,
    "aria-current": picture === current && "true",
    "data-rejected": Boolean(picture.problem),
    onclick: () => show(picture),
  };
  if (!picture.shown) return h("button", attributes, picture.file.name.split(".").pop());
  return h("button", attributes, cover(picture.shown.canvas));
}

// Answers

function showAnswers() {
  const place = byId("answers");
  place.removeAttribute("aria-busy");
  if (!current) {
    place.replaceChildren(nothingYet());
  } else if (current.problem) {
    place.replaceChildren(errorBox(current.problem));
    byId("spoken").textContent = "";
  } else if (!current.answer) {
    place.replaceChildren(h("p", { class: "waiting" }, "Predicting…"));
  } else {
    const tasks = Object.entries(current.answer.images[0].tasks);
    place.replaceChildren(
      tasks.length ? h("div", { class: "cards" }, ...tasks.map(card)) : noTasks(),
      facts(current.answer),
    );
    byId("spoken").textContent = spoken(current.file.name, tasks);
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

function noTasks() {
  return h(
    "div",
    { class: "empty" },
    h("p", { class: "lead" }, "There are no tasks yet"),
    h(
      "p",
      {},
      "The image was read, but there is no task to classify it. ",
      h("a", { href: "#tasks" }, "Publish a task"),
      ".",
    ),
  );
}

/**
 * @param {[string, Answer]} entry
 */
function card([task, found]) {
  const version = found.version === null ? "built in" : `version ${found.version}`;
  return h(
    "article",
    { class: "card", "data-task": task, "data-in-distribution": found.in_distribution === false && "false" },
    current?.shown && found.attention && lookButton(task, found.attention, current.shown),
    h(
      "div",
      { class: "grow" },
      h("header", {}, h("h2", {}, task), h("span", { class: "hint" }, version)),
      ...renderAnswer(found),
      current && correction(task, found, current, () => correctedOf(task)),
    ),
  );
}

/**
 * Predict again after a correction and keep the focus.
 * @param {string} task
 */
async function correctedOf(task) {
  const picture = current;
  if (!picture) return;
  await answer(picture);
  const card = document.querySelector(`#answers .card[data-task="${CSS.escape(task)}"]`);
  const button = /** @type {HTMLElement | null} */ (card?.querySelector(".correct button") ?? null);
  if (document.activeElement === document.body) button?.focus({ preventScroll: true });
}

/**
 * @param {string} task
 * @param {import("./heatmap.js").Attention} attention
 * @param {import("./heatmap.js").Picture} shown
 */
function lookButton(task, attention, shown) {
  const { grid } = attention;
  const height = Math.round((SMALL * grid.length) / grid[0].length);
  const small = /** @type {HTMLCanvasElement} */ (h("canvas", { width: SMALL, height }));
  drawSeen(small, shown, attention, current?.answer.view);
  return h(
    "button",
    {
      type: "button",
      class: "look",
      "data-task": task,
      "aria-pressed": String(looking === task),
      "aria-label": `Show the attention of ${task}`,
      title: `Attention of ${task}`,
      onclick: () => look(task),
    },
    small,
  );
}

/** @type {Record<string, string>} */
const CACHE = {
  hit: "The image was cached: only the tasks were computed.",
  miss: "The image was new; its context is now cached.",
  off: "The context cache is off on this server.",
};

/** @param {any} answer */
function facts(answer) {
  const image = answer.images[0];
  const { queue: waited, decode: decoded, forward, total } = answer.timings_ms;
  const parts = [
    ["waiting", waited],
    ["decoding", decoded],
    ["model", forward],
    ["other", Math.max(0, total - waited - decoded - forward)],
  ];
  const line = h("div", { class: "timeline", "aria-hidden": "true" });
  for (const [name, took] of parts) {
    const part = h("span", { "data-part": name });
    part.style.setProperty("--share", String(took / total));
    line.append(part);
  }
  return h(
    "div",
    { class: "facts" },
    h(
      "p",
      { class: "took" },
      h("b", {}, milliseconds(total)),
      " for ",
      plural(Object.keys(image.tasks).length, "task"),
    ),
    line,
    h(
      "ul",
      { class: "parts" },
      ...parts.map(([name, took]) =>
        h("li", { "data-part": name }, `${name} ${milliseconds(Number(took))}`),
      ),
    ),
    h(
      "p",
      { class: "hint" },
      h("span", { class: "badge", "data-cache": image.cache }, `cache ${image.cache}`),
      " ",
      CACHE[image.cache],
    ),
    h(
      "p",
      { class: "hint digest" },
      `${answer.backbone} · generation ${answer.generation} · `,
      h("code", { title: image.digest }, `${image.digest.slice(0, 19)}…`),
    ),
  );
}

/**
 * The screen reader text for new answers.
 * @param {string} name
 * @param {[string, Answer][]} tasks
 */
function spoken(name, tasks) {
  const best = tasks
    .filter(([, found]) => found.predictions?.length)
    .map(([task, found]) =>
      found.in_distribution === false
        ? `${task}: ${OUT_OF_DISTRIBUTION}`
        : `${task}: ${found.predictions?.[0].label}, ${percent(found.predictions?.[0].score ?? 0)}`,
    );
  return `${plural(tasks.length, "task")} answered for ${name}. ${best.join(". ")}`;
}
