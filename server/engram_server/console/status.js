// @ts-check
/** The state of the server, beside a dot that follows it. */

import { onUnreachable } from "./api.js";
import { byId } from "./ui.js";

const EVERY_MS = 1500; // so that the dot follows the server within two seconds
const PATIENCE_MS = 5000;

/**
 * @typedef {{ready: boolean, reasons: string[], backbone?: string, reads_names?: boolean}} Readiness
 */

let isReady = false;

/**
 * Watch the server while the page is visible.
 * @param {(state: Readiness) => void} becameReady
 */
export function watchServer(becameReady) {
  let timer = 0;
  const look = async () => {
    clearTimeout(timer);
    if (document.hidden) return;
    const state = await readState();
    show(state);
    if (state.ready && !isReady) becameReady(state);
    isReady = state.ready;
    timer = setTimeout(look, EVERY_MS);
  };
  document.addEventListener("visibilitychange", look);
  onUnreachable(() => {
    isReady = false;
    show(UNREACHABLE);
  });
  look();
}

/** @type {Readiness} */
const UNREACHABLE = { ready: false, reasons: ["The server is not reachable."] };

/** @returns {Promise<Readiness>} */
async function readState() {
  try {
    const address = new URL("readyz", document.baseURI);
    return await (await fetch(address, { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
  } catch {
    return UNREACHABLE;
  }
}

/** @param {Readiness} state */
function show({ ready, reasons, backbone }) {
  const place = byId("server");
  const text = ready ? (backbone ?? "") : reasons.join(" ");
  // A live region: the same text again would be read again.
  if (place.textContent !== text) place.textContent = text;
  place.dataset.state = ready ? "ready" : "failed";
}
