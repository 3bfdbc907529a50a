// @ts-check
/** Takes a picture with the camera of a phone or the webcam of a desktop computer. */

import { h } from "./ui.js";

const QUALITY = 0.92; // of the JPEG
const WIDTH = 1280;

/** @type {Record<string, string>} By the name of the browser's error. */
const REASONS = {
  NotAllowedError:
    "The browser does not allow this page to use the camera. Allow it for this page in the address bar, then try again.",
  NotFoundError: "No camera was found. Connect one, then try again.",
  NotReadableError: "Another program uses the camera. Close it, then try again.",
};
const INSECURE =
  "Browsers allow the camera only on https and on localhost. Choose a photo from your files instead.";

/**
 * Start the camera and show it.
 * @param {HTMLVideoElement} video
 * @returns {Promise<() => void>} stops the camera
 */
export async function startCamera(video) {
  if (!navigator.mediaDevices) throw new Error(INSECURE);
  const stream = await navigator.mediaDevices
    .getUserMedia({ video: { facingMode: "environment", width: { ideal: WIDTH } } })
    .catch((error) => {
      throw new Error(REASONS[error.name] ?? `The camera cannot be used: ${error.message}.`);
    });
  video.srcObject = stream;
  return () => {
    for (const track of stream.getTracks()) track.stop();
    video.srcObject = null;
  };
}

/**
 * What the camera shows now, as a file.
 * @param {HTMLVideoElement} video
 * @returns {Promise<File>}
 */
export async function snapshot(video) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  canvas.getContext("2d")?.drawImage(video, 0, 0);
  /** @type {Blob | null} */
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
  if (!blob) throw new Error("The browser could not save the picture.");
  const time = new Date().toISOString().slice(11, 23).replaceAll(/[:.]/g, "-");
  return new File([blob], `camera-${time}.jpg`, { type: "image/jpeg" });
}

/** Whether this device opens its own camera for a file input: phones and tablets do. */
export function hasOwnCamera() {
  return window.matchMedia("(pointer: coarse)").matches;
}

/**
 * Open a dialog that shows the webcam.
 * @returns {Promise<File | null>} the picture; null if the dialog was closed
 */
export function takePicture() {
  return new Promise((resolve) => {
    /** @type {File | null} */
    let picture = null;
    let stop = () => {};
    const video = /** @type {HTMLVideoElement} */ (
      h("video", { autoplay: true, playsinline: true, "aria-label": "What the camera shows" })
    );
    video.muted = true;
    const message = h("p", { class: "hint", role: "status" }, "Starting the camera…");
    const take = /** @type {HTMLButtonElement} */ (
      h("button", { type: "button", class: "primary", disabled: true }, "Take the picture")
    );
    const dialog = /** @type {HTMLDialogElement} */ (
      h(
        "dialog",
        { class: "camera-dialog", "aria-labelledby": "camera-title" },
        h("h2", { id: "camera-title" }, "Camera"),
        video,
        message,
        h(
          "div",
          { class: "actions" },
          take,
          h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
        ),
      )
    );
    take.addEventListener("click", async () => {
      picture = await snapshot(video);
      dialog.close();
    });
    video.addEventListener("playing", () => {
      message.textContent = "";
      take.disabled = false;
      take.focus();
    });
    dialog.addEventListener("close", () => {
      stop();
      dialog.remove();
      resolve(picture);
    });
    document.body.append(dialog);
    dialog.showModal();
    startCamera(video).then(
      (stopCamera) => {
        stop = stopCamera;
        if (!dialog.open) stop(); // it was closed while the camera started
      },
      (error) => {
        video.hidden = true;
        message.textContent = error.message;
      },
    );
  });
}
