// @ts-check
/** Ways a photo comes in: chosen from the files, taken with the camera, dropped. */

import { h } from "./ui.js";

/**
 * Buttons that open the files and, on a phone, the camera.
 * @param {{what: string, several: boolean, take: (files: File[]) => void}} options
 */
export function picker({ what, several, take }) {
  const files = chooser({ multiple: several }, take);
  const camera = chooser({ capture: "environment" }, take);
  const button = { type: "button" };
  return [
    h("button", { ...button, class: "choose", onclick: () => files.click() }, `Choose ${what}`),
    h("button", { ...button, class: "camera", onclick: () => camera.click() }, "Use the camera"),
    files,
    camera,
  ];
}

/**
 * @param {Record<string, any>} attributes
 * @param {(files: File[]) => void} take
 */
function chooser(attributes, take) {
  const input = /** @type {HTMLInputElement} */ (
    h("input", {
      type: "file",
      accept: "image/*",
      class: "unseen",
      tabindex: -1,
      "aria-hidden": "true",
      ...attributes,
    })
  );
  input.addEventListener("change", () => {
    take([...(input.files ?? [])]);
    input.value = "";
  });
  return input;
}

/**
 * Files that are let go of over the element are its own.
 * @param {HTMLElement} element
 * @param {(files: File[]) => void} take
 */
export function takeDrops(element, take) {
  const over = (/** @type {boolean} */ is) => element.classList.toggle("over", is);
  element.addEventListener("dragover", () => over(true));
  element.addEventListener("dragleave", (event) => {
    if (!element.contains(/** @type {Node | null} */ (event.relatedTarget))) over(false);
  });
  element.addEventListener("drop", (event) => {
    event.preventDefault(); // the page knows by this that they are taken
    over(false);
    take([...(event.dataTransfer?.files ?? [])]);
  });
}
