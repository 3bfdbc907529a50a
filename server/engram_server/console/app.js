// @ts-check
/** The console: which page is shown, the theme, the key, and the state of the server. */

import { json, key, onKeyRequired } from "./api.js";
import * as live from "./live.js";
import * as predict from "./predict.js";
import * as tasks from "./tasks.js";
import * as teach from "./teach.js";
import { ask, byId, h } from "./ui.js";
import { judge } from "./upload.js";

const PAGES = ["ask", "teach", "tasks", "live"];
const THEME = "engram-theme";
const READY_AGAIN_MS = 15_000;
const NOT_READY_AGAIN_MS = 2_000;

function main() {
  startTheme();
  startKey();
  startDrops();
  predict.start();
  teach.start();
  tasks.start();
  live.start();
  window.addEventListener("hashchange", () => {
    route();
    // What had the focus may be gone; the Tab key goes on from the new page's start.
    byId("main").focus({ preventScroll: true });
  });
  if (!PAGES.includes(address().page)) history.replaceState(null, "", "#ask");
  route();
  watchServer();
}

// Pages

function address() {
  const [page, ...rest] = location.hash.slice(1).split("/");
  return { page, below: rest.length ? decodeURIComponent(rest.join("/")) : null };
}

/** Show the page the address names; others (the skip link's) leave the page as it is. */
function route() {
  const { page, below } = address();
  if (!PAGES.includes(page)) return;
  for (const each of PAGES) {
    byId(`page-${each}`).hidden = each !== page;
    const link = document.querySelector(`.pages a[href="#${each}"]`);
    if (each === page) link?.setAttribute("aria-current", "page");
    else link?.removeAttribute("aria-current");
  }
  const titles = { ask: "Ask", teach: "Teach", tasks: below ?? "Tasks", live: "Live" };
  document.title = `${titles[/** @type {"ask"} */ (page)]} · Engram`;
  if (page === "teach") teach.open(below);
  if (page === "tasks") tasks.open(below);
  if (page === "live") live.open();
}

// Files from anywhere on the page

function startDrops() {
  const over = (/** @type {boolean} */ is) => document.body.classList.toggle("dragging", is);
  window.addEventListener("dragover", (event) => {
    event.preventDefault();
    over(true);
  });
  window.addEventListener("dragleave", (event) => event.relatedTarget === null && over(false));
  window.addEventListener("drop", (event) => {
    const taken = event.defaultPrevented; // by the part of the page it fell on
    event.preventDefault();
    over(false);
    if (!taken) take([...(event.dataTransfer?.files ?? [])]);
  });
  window.addEventListener("paste", (event) => take([...(event.clipboardData?.files ?? [])]));
}

/** @param {File[]} files */
function take(files) {
  const bundle = files.find((file) => file.name.endsWith(".safetensors"));
  const images = files.filter((file) => file !== bundle);
  if (bundle) {
    location.hash = "#tasks";
    judge(bundle);
  } else if (images.length && address().page === "teach") {
    teach.take(images);
  } else if (images.length) {
    location.hash = "#ask";
    predict.addImages(images);
  }
}

// Light and dark

function startTheme() {
  const root = document.documentElement;
  const button = byId("theme");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const update = () => (button.textContent = isDark() ? "Light" : "Dark");
  const kept = localStorage.getItem(THEME);
  if (kept === "dark" || kept === "light") root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem(THEME, root.dataset.theme);
    update();
  });
  dark.addEventListener("change", update);
  update();
}

// The key

function startKey() {
  /** @type {Promise<boolean> | null} One dialog, however many requests wait for it. */
  let asking = null;
  const enter = (/** @type {string} */ detail) => {
    asking ??= askKey(detail).finally(() => (asking = null));
    return asking;
  };
  showKey();
  byId("key").addEventListener("click", async () => {
    if (await enter("The key is sent with every request and kept until you close this tab.")) route();
  });
  onKeyRequired((problem) => enter(problem.detail));
}

/** @param {string} detail */
async function askKey(detail) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "password",
      required: true,
      autocomplete: "off",
      pattern: "[!-~]+",
      name: "key",
    })
  );
  const entered = await ask({
    title: "This server requires a key",
    body: [h("p", {}, detail), h("label", {}, "Key", input)],
    confirm: "Use it",
    read: () => input.value,
    also: key.get() === null ? undefined : { label: "Forget the key", run: forget },
  });
  if (!entered) return false;
  key.set(entered);
  showKey();
  return true;
}

function forget() {
  key.forget();
  showKey();
}

function showKey() {
  const keyed = key.get() !== null;
  byId("key").hidden = !keyed;
  // Links cannot carry the key, so their targets would answer 401.
  byId("links").hidden = keyed;
}

// The server

let wasReady = false;

async function watchServer() {
  const place = byId("server");
  let isReady = false;
  try {
    const response = await fetch(new URL("readyz", document.baseURI));
    const state = await response.json();
    isReady = state.ready;
    teach.offerNames(Boolean(state.reads_names));
    place.textContent = isReady ? state.backbone : state.reasons.join(" ");
  } catch {
    place.textContent = "The server is not reachable.";
  }
  place.dataset.state = isReady ? "ready" : "failed";
  if (isReady && !wasReady) greet();
  wasReady = isReady;
  setTimeout(watchServer, isReady ? READY_AGAIN_MS : NOT_READY_AGAIN_MS);
}

/** Ask for something that needs the key, where there is one, before the person has begun. */
async function greet() {
  await json("tasks").catch(() => {});
  route();
}

main();
