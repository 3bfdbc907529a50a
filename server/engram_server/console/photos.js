// @ts-check
/** Photos by the digest the server knows them by: their names, and small pictures to show. */

import { sha256 } from "./sha256.js";
import { h } from "./ui.js";

const LARGEST = 1200; // pixels of the longest edge that is kept for showing
const SMALLEST = 480; // so that a thumbnail stays recognisable
const THUMBNAIL = { width: 152, height: 116 };

/** @type {Map<string, {name: string, small: HTMLCanvasElement | null}>} by digest */
const seen = new Map();

/**
 * The picture, upright and of a size to be shown; null if the browser cannot read it.
 * @param {Blob} file
 */
export async function decode(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    return null;
  }
  const longest = Math.max(bitmap.width, bitmap.height);
  const scale = longest > LARGEST ? LARGEST / longest : longest < SMALLEST ? SMALLEST / longest : 1;
  const kept = document.createElement("canvas");
  kept.width = Math.max(1, Math.round(bitmap.width * scale));
  kept.height = Math.max(1, Math.round(bitmap.height * scale));
  kept.getContext("2d")?.drawImage(bitmap, 0, 0, kept.width, kept.height);
  const { width, height } = bitmap;
  bitmap.close();
  return { canvas: kept, width, height };
}

/**
 * A small canvas filled with the middle of an image.
 * @param {HTMLCanvasElement} image
 */
export function cover(image) {
  const small = /** @type {HTMLCanvasElement} */ (h("canvas", THUMBNAIL));
  const scale = Math.max(small.width / image.width, small.height / image.height);
  const [wide, tall] = [image.width * scale, image.height * scale];
  const [left, top] = [(small.width - wide) / 2, (small.height - tall) / 2];
  small.getContext("2d")?.drawImage(image, left, top, wide, tall);
  return small;
}

/**
 * Read a photo and remember what it looks like.
 * @param {File} file
 * @returns {Promise<string>} its digest
 */
export async function look(file) {
  const digest = `sha256:${sha256(new Uint8Array(await file.arrayBuffer()))}`;
  if (!hasPicture(digest)) remember(digest, file.name, (await decode(file))?.canvas ?? null);
  return digest;
}

/**
 * @param {string} digest
 * @param {string} name
 * @param {HTMLCanvasElement | null} image
 */
export function remember(digest, name, image) {
  seen.set(digest, { name, small: image && cover(image) });
  for (const place of document.querySelectorAll(`[data-digest="${digest}"]`)) fill(place, digest);
}

/** @param {string} digest */
export function hasPicture(digest) {
  return Boolean(seen.get(digest)?.small);
}

/**
 * Remember an example of the server: its name, and its thumbnail if there is one.
 * @param {{digest: string, name: string | null, thumbnail?: string}} example
 */
export async function rememberExample({ digest, name, thumbnail: address }) {
  if (hasPicture(digest) || (!address && seen.get(digest)?.name === name)) return;
  const image = address ? await decode(blobOf(address)) : null;
  if (name || image) remember(digest, name ?? nameOf(digest), image?.canvas ?? null);
}

/**
 * The content of a data URL in base64; the page's own policy does not allow to load one.
 * @param {string} address
 */
function blobOf(address) {
  const bytes = Uint8Array.from(atob(address.split(",", 2)[1] ?? ""), (letter) => letter.charCodeAt(0));
  return new Blob([bytes], { type: "image/webp" });
}

/**
 * What to call a photo: its file's name, or the start of its digest if it has none.
 * @param {string} digest
 */
export function nameOf(digest) {
  return seen.get(digest)?.name ?? digest.slice(7, 15);
}

/**
 * A small picture of the photo, now or when it arrives; its name where there is none.
 * @param {string} digest
 */
export function thumbnail(digest) {
  const place = h("span", { class: "small-photo", "data-digest": digest });
  fill(place, digest);
  return place;
}

/**
 * @param {Element} place
 * @param {string} digest
 */
function fill(place, digest) {
  const name = nameOf(digest);
  const small = seen.get(digest)?.small;
  place.setAttribute("title", name);
  if (!small) {
    place.replaceChildren(name);
    return;
  }
  const attributes = { ...THUMBNAIL, role: "img", "aria-label": name };
  const copy = /** @type {HTMLCanvasElement} */ (h("canvas", attributes));
  copy.getContext("2d")?.drawImage(small, 0, 0);
  place.replaceChildren(copy);
}

/**
 * @param {Blob} file
 * @returns {Promise<string>}
 */
export function base64(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(String(reader.result).split(",", 2)[1] ?? "");
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
