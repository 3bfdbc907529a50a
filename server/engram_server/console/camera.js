// @ts-check
/** The webcam of a desktop: frames become photos while a button is held. */

import { h } from "./ui.js";

const FRAME_MS = 150;
const MOST_FRAMES = 300; // of one opening
const QUALITY = 0.9;

/** @type {Record<string, string>} */
const REASONS = {
  NotAllowedError: "The browser may not use the camera. Allow it for this page, and try again.",
  NotFoundError: "No camera was found. Connect one, or choose photos from your files.",
  NotReadableError: "Another program uses the camera. Close it, and try again.",
};
const INSECURE = "Browsers open the camera only on https or localhost.";

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
      const stream = await openStream();
      const video = new Recorder(stream, take);
      closeOpen = () => {
        closeOpen = null;
        video.close();
        show(false);
        place.replaceChildren();
        if (document.activeElement === document.body) button.focus();
      };
      place.replaceChildren(...video.elements(() => closeOpen?.()));
      video.hold.focus();
    } catch (error) {
      place.replaceChildren(h("p", { class: "field-error", role: "alert" }, reasonOf(error)));
      closeOpen = () => {
        closeOpen = null;
        show(false);
      };
    }
  });
  return [button, place];
}

async function openStream() {
  if (!navigator.mediaDevices) throw new Error(INSECURE);
  return navigator.mediaDevices.getUserMedia({ video: { width: { ideal: 640 } }, audio: false });
}

/** @param {unknown} error */
function reasonOf(error) {
  if (error instanceof DOMException) return REASONS[error.name] ?? `The camera failed: ${error.message}.`;
  return error instanceof Error ? error.message : String(error);
}

class Recorder {
  /**
   * @param {MediaStream} stream
   * @param {(files: File[]) => void} take
   */
  constructor(stream, take) {
    this.stream = stream;
    this.take = take;
    this.count = 0;
    this.timer = 0;
    this.video = /** @type {HTMLVideoElement} */ (h("video", { playsinline: true, muted: true }));
    this.video.srcObject = stream;
    this.video.muted = true;
    this.status = h("span", { class: "hint", role: "status" });
    this.hold = h("button", { type: "button", class: "primary record" }, "Hold to record");
    this.#listen();
    this.video.play().catch(() => {}); // interrupted by closing it
  }

  /** @param {() => void} done */
  elements(done) {
    const close = h("button", { type: "button", onclick: done }, "Done");
    return [this.video, h("div", { class: "actions" }, this.hold, close, this.status)];
  }

  close() {
    this.#stop();
    for (const track of this.stream.getTracks()) track.stop();
    this.video.srcObject = null;
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
    const { videoWidth: width, videoHeight: height } = this.video;
    if (!width) return; // the first frame has not arrived
    if (this.count >= MOST_FRAMES) {
      this.#stop();
      return;
    }
    const canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { width, height }));
    canvas.getContext("2d")?.drawImage(this.video, 0, 0);
    const name = `webcam-${Date.now()}.jpg`;
    this.count += 1;
    this.status.textContent = `${this.count} taken`;
    canvas.toBlob((blob) => blob && this.take([new File([blob], name, { type: blob.type })]), "image/jpeg", QUALITY);
  }
}
