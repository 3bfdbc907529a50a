// @ts-check
/** The console: which page is shown, the theme, and files from anywhere on the page. */

import { json } from "./api.js";
import * as ask from "./ask/page.js";
import { startKey } from "./key.js";
import * as live from "./live.js";
import { droppedFiles } from "./sources.js";
import { watchServer } from "./status.js";
import * as tasks from "./tasks/list.js";
import { judge } from "./tasks/upload.js";
import * as teach from "./teach.js";
import { byId } from "./ui.js";

const PAGES = ["ask", "teach", "tasks", "live"];
const THEME = "engram-theme";

function main() {
  startTheme();
  startKey(route);
  startDrops();
  ask.start();
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
  watchServer(greet);
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
  window.addEventListener("drop", async (event) => {
    const taken = event.defaultPrevented; // by the part of the page it fell on
    event.preventDefault();
    over(false);
    if (!taken) take(await droppedFiles(event.dataTransfer));
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
    ask.addFiles(images);
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

/**
 * Ask for something that needs the key, where there is one, before the person has begun.
 * @param {import("./status.js").Readiness} state
 */
async function greet(state) {
  teach.offerNames(Boolean(state.reads_names));
  await json("tasks?limit=1").catch(() => {});
  route();
}

main();
