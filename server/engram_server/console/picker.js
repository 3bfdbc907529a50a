// @ts-check
/** Ways photos come in: chosen from the files, taken with the camera, dropped. */

import { droppedFiles } from "./sources.js";
import { h } from "./ui.js";
import { webcam } from "./webcam.js";

/**
 * A file with the folders it lies in, the outermost first; none if it was chosen or dropped alone.
 * @typedef {{file: File, folders: string[]}} Found
 */

const IMAGE_NAME = /\.(jpe?g|png|webp|gif|bmp|tiff?|avif|hei[cf]|ppm|pgm|pbm|pfm|mpo)$/i;

/**
 * Buttons that open the files and the camera: of a phone, or else of a desktop.
 * @param {{what: string, several: boolean, take: (files: File[]) => void}} options
 */
export function picker({ what, several, take }) {
  const files = chooser({ accept: "image/*", multiple: several }, take);
  const camera = chooser({ accept: "image/*", capture: "environment" }, take);
  const button = { type: "button" };
  return [
    h("button", { ...button, class: "choose", onclick: () => files.click() }, `Choose ${what}`),
    h("button", { ...button, class: "camera", onclick: () => camera.click() }, "Use the camera"),
    ...webcam(take),
    files,
    camera,
  ];
}

/**
 * A button that opens a folder with everything in it.
 * @param {string} text
 * @param {(found: Found[]) => void} take
 */
export function folderPicker(text, take) {
  const chosen = chooser({ webkitdirectory: true }, (files) => {
    take(files.map(inFolders).filter(isPhoto));
  });
  return [h("button", { type: "button", class: "choose-folder", onclick: () => chosen.click() }, text), chosen];
}

/**
 * @param {Record<string, any>} attributes
 * @param {(files: File[]) => void} take
 */
function chooser(attributes, take) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", { type: "file", class: "unseen", tabindex: -1, "aria-hidden": "true", ...attributes })
  );
  input.addEventListener("change", () => {
    take([...(input.files ?? [])]);
    input.value = "";
  });
  return input;
}

/**
 * Files that are dropped over the element, also in folders, unless an element inside it took them.
 * @param {HTMLElement} element
 * @param {(files: File[], found: Found[]) => void} take
 */
export function takeDrops(element, take) {
  const over = (/** @type {boolean} */ is) => element.classList.toggle("over", is);
  element.addEventListener("dragover", () => over(true));
  element.addEventListener("dragleave", (event) => {
    if (!element.contains(/** @type {Node | null} */ (event.relatedTarget))) over(false);
  });
  element.addEventListener("drop", async (event) => {
    over(false);
    if (event.defaultPrevented) return;
    event.preventDefault(); // the page knows by this that they are taken
    const found = (await droppedFiles(event.dataTransfer))
      .map(inFolders)
      .filter((each) => !each.folders.length || isPhoto(each));
    take(
      found.map(({ file }) => file),
      found,
    );
  });
}

/**
 * @param {File} file
 * @returns {Found}
 */
function inFolders(file) {
  return { file, folders: file.webkitRelativePath.split("/").slice(0, -1) };
}

/** @param {Found} found */
function isPhoto({ file }) {
  return !file.name.startsWith(".") && (file.type.startsWith("image/") || IMAGE_NAME.test(file.name));
}
