// @ts-check
/** "Call this from code": requests for a task in several languages, ready to be copied. */

import { key } from "../api.js";
import { byId, h, note } from "../ui.js";

/**
 * @typedef {{address: string, task: string, needsKey: boolean}} Target
 * @type {{name: string, about: string, page: string, write: (target: Target) => string}[]}
 */
const LANGUAGES = [
  { name: "curl", about: "HTTP API", page: "http-api.md", write: curl },
  { name: "Python", about: "Python client", page: "client.md", write: python },
  { name: "TypeScript", about: "HTTP API", page: "http-api.md", write: typescript },
];

/** @param {string} task */
export function codePanel(task) {
  const target = {
    address: new URL(".", document.baseURI).href.replace(/\/$/, ""),
    task,
    needsKey: key.get() !== null,
  };
  const tabs = LANGUAGES.map(({ name }) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `code-${name}` }, name),
  );
  const panels = LANGUAGES.map((language) => codeOf(language, target));
  const show = (/** @type {number} */ place) => {
    tabs.forEach((tab, each) => {
      tab.setAttribute("aria-selected", String(each === place));
      tab.tabIndex = each === place ? 0 : -1;
      panels[each].hidden = each !== place;
    });
  };
  tabs.forEach((tab, place) => {
    tab.addEventListener("click", () => show(place));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = (place + step + tabs.length) % tabs.length;
      show(next);
      tabs[next].focus();
    });
  });
  show(0);
  return h(
    "details",
    { class: "panel code" },
    h("summary", {}, "Call this from code"),
    h("div", { class: "tabs", role: "tablist", "aria-label": "Languages" }, ...tabs),
    ...panels,
    target.needsKey && h("p", { class: "hint" }, "Put your key into the environment variable ENGRAM_API_KEY."),
  );
}

/**
 * @param {typeof LANGUAGES[0]} language
 * @param {Target} target
 */
function codeOf({ name, about, page, write }, target) {
  const text = write(target);
  const copy = async () => {
    // There is no clipboard on plain http; the text can still be selected.
    const done = await navigator.clipboard?.writeText(text).then(
      () => true,
      () => false,
    );
    note(done ? `The ${name} code is copied.` : "The browser does not allow copying here. Select the text.");
  };
  return h(
    "div",
    { role: "tabpanel", id: `code-${name}`, "aria-labelledby": `tab-${name}` },
    h("pre", { tabindex: 0, "aria-label": `${name} code` }, h("code", {}, text)),
    h(
      "div",
      { class: "actions" },
      h("button", { type: "button", onclick: copy }, "Copy"),
      h("a", { class: "button", href: documentation(page), rel: "noopener" }, `${about} documentation`),
    ),
  );
}

/** @param {string} page of the reference */
function documentation(page) {
  const { href } = /** @type {HTMLAnchorElement} */ (byId("documentation"));
  return new URL(`reference/${page}`, href).href;
}

/** @param {Target} target */
function predictAddress({ address, task }) {
  return `${address}/predict?tasks=${encodeURIComponent(task).replace("%2F", "/")}`;
}

/** @param {Target} target */
function curl(target) {
  const header = target.needsKey ? ' -H "Authorization: Bearer $ENGRAM_API_KEY"' : "";
  return `curl${header} -T photo.jpg \\\n  "${predictAddress(target)}"`;
}

/** @param {Target} target */
function python({ address, task, needsKey }) {
  const [load, pass] = needsKey ? ["import os\n\n", ', api_key=os.environ["ENGRAM_API_KEY"]'] : ["", ""];
  return `${load}from engram_vit import Client  # pip install engram-vit

client = Client("${address}"${pass})
answers = client.predict("photo.jpg", tasks=["${task}"])
print(answers[0]["${task}"].predictions)`;
}

/** @param {Target} target */
function typescript(target) {
  const header = target.needsKey
    ? '\n  headers: { Authorization: "Bearer " + process.env.ENGRAM_API_KEY },'
    : "";
  return `import { readFile } from "node:fs/promises";

const response = await fetch("${predictAddress(target)}", {
  method: "POST",${header}
  body: await readFile("photo.jpg"),
});
const { images } = await response.json();
console.log(images[0].tasks["${target.task}"].predictions);`;
}
