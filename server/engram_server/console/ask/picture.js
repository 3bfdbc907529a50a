// @ts-check
/** The large picture with the attention of a task, and the strip of the other photos. */

import { COLOURS, draw } from "../heatmap.js";
import { byId, h, percent } from "../ui.js";

/** @typedef {import("./photo.js").Photo} Photo */

const STRIP = 12; // photos in the strip: those around the current one

const canvas = /** @type {HTMLCanvasElement} */ (byId("canvas"));

/**
 * @param {Photo} photo
 * @param {import("../heatmap.js").Picture | null} shown null if the browser cannot read the format
 * @param {string | null} looking the task whose attention is drawn
 * @param {() => void} hide the attention
 */
export function showPicture(photo, shown, looking, hide) {
  canvas.hidden = shown === null;
  byId("no-preview").hidden = shown !== null || photo.problem !== null;
  const answer = looking ? photo.detail?.images[0].tasks[looking] : null;
  const attention = answer?.attention ?? null;
  if (shown) {
    [canvas.width, canvas.height] = [shown.canvas.width, shown.canvas.height];
    draw(canvas, shown, attention, photo.detail?.view ?? null);
    const about = attention ? `${photo.shortName} with the attention of ${looking}` : photo.shortName;
    canvas.setAttribute("aria-label", about);
  }
  byId("caption").replaceChildren(...caption(photo, attention, looking, hide));
}

/**
 * @param {Photo} photo
 * @param {import("../heatmap.js").Attention | null} attention
 * @param {string | null} looking
 * @param {() => void} hide
 */
function caption(photo, attention, looking, hide) {
  if (!attention) {
    const hint = photo.detail ? "Choose a task to see its attention." : "";
    const name = h("span", { class: "file", title: photo.name }, photo.shortName);
    return [name, h("span", { class: "hint" }, hint)];
  }
  return [
    h("span", {}, "Attention of ", h("b", {}, looking)),
    h("button", { type: "button", class: "quiet", onclick: hide }, "Hide"),
    h("span", { class: "hint" }, `${percent(attention.on_patches)} of the attention is on image patches`),
    legend(),
  ];
}

function legend() {
  const ramp = h("span", { class: "ramp" });
  ramp.style.setProperty("--ramp", COLOURS.join(", "));
  return h("span", { class: "legend hint" }, "less", ramp, "more");
}

/**
 * The photos around the current one, each with a button that removes it.
 * @param {Photo[]} photos
 * @param {Photo | null} current
 * @param {(photo: Photo) => void} show
 * @param {(photo: Photo) => void} remove
 */
export function strip(photos, current, show, remove) {
  if (photos.length < 2) return [];
  const place = current ? photos.indexOf(current) : 0;
  const first = Math.max(0, Math.min(place - STRIP / 2, photos.length - STRIP));
  return photos.slice(first, first + STRIP).map((photo) => {
    const removing = { type: "button", class: "remove", "aria-label": `Remove ${photo.shortName}` };
    return h(
      "li",
      {},
      thumbnailButton(photo, () => show(photo), photo === current),
      h("button", { ...removing, onclick: () => remove(photo) }, "×"),
    );
  });
}

/**
 * A button with a small picture of a photo, or its kind of file where there is none.
 * @param {Photo} photo
 * @param {() => void} open
 * @param {boolean} [current]
 */
export function thumbnailButton(photo, open, current = false) {
  const button = h("button", {
    type: "button",
    class: "thumbnail",
    "aria-label": photo.problem ? `${photo.shortName}, rejected` : photo.shortName,
    "aria-current": current && "true",
    "data-rejected": Boolean(photo.problem),
    onclick: open,
  });
  photo.thumbnail().then((small) => {
    if (!small) return button.append(photo.shortName.split(".").pop() ?? "");
    const copy = /** @type {HTMLCanvasElement} */ (h("canvas", { width: small.width, height: small.height }));
    copy.getContext("2d")?.drawImage(small, 0, 0);
    button.append(copy);
  });
  return button;
}
