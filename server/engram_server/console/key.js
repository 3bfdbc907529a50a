// @ts-check
/** The key of a server that needs one: asked for in a dialog, kept until the tab is closed. */

import { key, onKeyRequired } from "./api.js";
import { ask, byId, h } from "./ui.js";

const KEPT = "The key is kept until you close this tab.";

/** @param {() => void} changed there is another key */
export function startKey(changed) {
  /** @type {Promise<boolean> | null} One dialog, however many requests wait for it. */
  let asking = null;
  const enter = (/** @type {{title: string, text: string[]}} */ reason) => {
    asking ??= askForKey(reason).finally(() => (asking = null));
    return asking;
  };
  showKey();
  byId("key").addEventListener("click", async () => {
    if (await enter({ title: "Your key", text: [KEPT] })) changed();
  });
  onKeyRequired((problem) => enter(reasonOf(problem)));
}

/**
 * Why a key is needed, in the words of a person.
 * @param {import("./api.js").Problem} problem
 */
function reasonOf({ kind, detail }) {
  if (kind === "not-permitted") {
    return {
      title: "Your key does not allow this",
      text: ["Enter a key that allows it, for example the admin key of this server.", KEPT],
    };
  }
  if (key.get() !== null) {
    return { title: "The server does not accept this key", text: [detail, KEPT] };
  }
  return {
    title: "This server needs a key",
    text: ["Enter the key that the operator of this server gave you.", KEPT],
  };
}

/** @param {{title: string, text: string[]}} reason */
async function askForKey({ title, text }) {
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
    title,
    body: [...text.map((each) => h("p", {}, each)), h("label", {}, "Key", input)],
    confirm: "Use this key",
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
  for (const link of document.querySelectorAll("[data-needs-key]")) {
    /** @type {HTMLElement} */ (link).hidden = keyed;
  }
}
