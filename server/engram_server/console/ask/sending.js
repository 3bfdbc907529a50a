// @ts-check
/** Sends many photos: a few per request, two requests at a time. */

import { Problem, json } from "../api.js";
import { isOtherFile } from "../sources.js";

/** @typedef {import("./photo.js").Photo} Photo */

const AT_ONCE = 8; // photos per request
const BYTES_AT_ONCE = 12_000_000;
const REQUESTS = 2;
// One image is bad, or together they are too large: smaller requests find out which.
const ABOUT_IMAGES = ["unreadable-image", "image-too-large", "too-many-images", "body-too-large", "answer-too-large"];

/**
 * Get the answers for photos. A bad photo keeps its problem and does not stop the others; any other
 * error does.
 * @param {Photo[]} photos
 * @param {string} query of the request
 * @param {{signal: AbortSignal, identify: (photo: Photo, file: File) => Promise<Photo>,
 *   finished: (photos: Photo[]) => void, busy: (text: string) => void}} options
 */
export async function sendAll(photos, query, options) {
  const waiting = [...photos];
  const work = async () => {
    while (waiting.length && !options.signal.aborted) {
      const batch = takeBatch(waiting);
      await sendBatch(batch, query, options);
      options.finished(batch);
    }
  };
  await Promise.all(Array.from({ length: REQUESTS }, work));
}

/** @param {Photo[]} waiting */
function takeBatch(waiting) {
  let [count, bytes] = [0, 0];
  while (count < Math.min(AT_ONCE, waiting.length)) {
    bytes += waiting[count].size;
    if (count && bytes > BYTES_AT_ONCE) break;
    count++;
  }
  return waiting.splice(0, count);
}

/**
 * @param {Photo[]} batch
 * @param {string} query
 * @param {Parameters<typeof sendAll>[2]} options
 */
async function sendBatch(batch, query, options) {
  /** @type {{photo: Photo, file: File}[]} */
  const items = [];
  for (const photo of batch) {
    try {
      if (isOtherFile(photo.name)) throw new Problem("Not an image", "This file is not an image.");
      const file = await photo.open();
      if ((await options.identify(photo, file)) === photo) items.push({ photo, file });
    } catch (error) {
      photo.reject(error);
    }
  }
  await send(items, query, options);
}

/**
 * @param {{photo: Photo, file: File}[]} items
 * @param {string} query
 * @param {Parameters<typeof sendAll>[2]} options
 * @returns {Promise<void>}
 */
async function send(items, query, options) {
  if (!items.length) return;
  const body = new FormData();
  for (const { file } of items) body.append("image", file, "image");
  try {
    const answer = await json(`predict?${query}`, { method: "POST", body, signal: options.signal });
    for (const [place, { photo }] of items.entries()) photo.accept(answer.images[place]);
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    if (error.retryAfter !== null) {
      await pause(error, options);
      return send(items, query, options);
    }
    if (!ABOUT_IMAGES.includes(error.kind)) throw error;
    if (items.length === 1) return items[0].photo.reject(error);
    const middle = items.length >> 1;
    await send(items.slice(0, middle), query, options);
    await send(items.slice(middle), query, options);
  }
}

/**
 * @param {Problem} problem
 * @param {{signal: AbortSignal, busy: (text: string) => void}} options
 */
function pause({ retryAfter }, { signal, busy }) {
  const seconds = Math.max(1, retryAfter ?? 1);
  busy(`The server is busy. Trying again in ${seconds} s.`);
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}
