// @ts-check
/** The webcam of a desktop: frames become photos while a button is held. */

import { snapshot, startCamera } from "./camera.js";
import { h } from "./ui.js";

const FRAME_MS = 150;
const MOST_FRAMES = 300; // of one opening

/** @type {(() => void) | null} Closes the open webcam; there is one at most. */
let closeOpen = null;
window.addEventListener("hashchange", () => closeOpen?.());
document.addEventListener("visibilitychange", () => document.hidden && closeOpen?.());

/**
 * A button that opens the webcam, and the place where it shows.
 * @param {(files: File[]) => void} take
 */
export function webcam(take) {
  const place = h("div", { class: "webcam-panel", hidden: true });
  const button = h("button", { type: "button", class: "webcam", "aria-expanded": "false" }, "Webcam");
  button.addEventListener("click", async () => {
    const wasOpen = !place.hidden;
    closeOpen?.();
    if (wasOpen) return;
    const show = (/** @type {boolean} */ shown) => {
      place.hidden = !shown;
      button.setAttribute("aria-expanded", String(shown));
    };
    show(true);
    try {
      const recorder = new Recorder(take);
      await recorder.open();
      closeOpen = () => {
        closeOpen = null;
        recorder.close();
        show(false);
        place.replaceChildren();
        if (document.activeElement === document.body) button.focus();
      };
      place.replaceChildren(...recorder.elements(() => closeOpen?.()));
      recorder.hold.focus();
    } catch (error) {
      place.replaceChildren(h("p", { class: "field-error", role: "alert" }, /** @type {Error} */ (error).message));
      closeOpen = () => {
        closeOpen = null;
        show(false);
      };
    }
  });
  return [button, place];
}

class Recorder {
  /** @param {(files: File[]) => void} take */
  constructor(take) {
    this.take = take;
    this.stopCamera = () => {};
    this.count = 0;
    this.timer = 0;
    this.video = /** @type {HTMLVideoElement} */ (h("video", { playsinline: true, muted: true }));
    this.video.muted = true;
    this.status = h("span", { class: "hint", role: "status" });
    this.hold = h("button", { type: "button", class: "primary record" }, "Hold to record");
    this.#listen();
  }

  async open() {
    this.stopCamera = await startCamera(this.video);
    this.video.play().catch(() => {}); // interrupted by closing it
  }

  /** @param {() => void} done */
  elements(done) {
    const close = h("button", { type: "button", onclick: done }, "Done");
    return [this.video, h("div", { class: "actions" }, this.hold, close, this.status)];
  }

  close() {
    this.#stop();
    this.stopCamera();
  }

  #listen() {
    const start = () => this.#start();
    const stop = () => this.#stop();
    this.hold.addEventListener("pointerdown", (event) => {
      // New photos move the button away from the pointer, which must not end the recording.
      this.hold.setPointerCapture(event.pointerId);
      start();
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture", "blur", "keyup"])
      this.hold.addEventListener(end, stop);
    this.hold.addEventListener("keydown", (event) => {
      if ((event.key === " " || event.key === "Enter") && !event.repeat) start();
    });
  }

  #start() {
    if (this.timer) return;
    this.hold.toggleAttribute("data-recording", true);
    this.#capture();
    this.timer = window.setInterval(() => this.#capture(), FRAME_MS);
  }

  #stop() {
    window.clearInterval(this.timer);
    this.timer = 0;
    this.hold.toggleAttribute("data-recording", false);
  }

  #capture() {
    if (!this.video.videoWidth) return; // the first frame has not arrived
    if (this.count >= MOST_FRAMES) {
      this.#stop();
      return;
    }
    this.count += 1;
    this.status.textContent = `${this.count} taken`;
    snapshot(this.video).then((file) => this.take([file]));
  }
}
