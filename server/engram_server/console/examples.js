// @ts-check
/** The example sets of taught tasks, and corrections of trained tasks. */

import { Problem, json, request, taskPath } from "./api.js";
import { base64, hasPicture, nameOf, rememberExample } from "./photos.js";

const AT_ONCE = 32; // photos per request: half of the server's default limit
const BYTES_AT_ONCE = 12_000_000;
const LISTED = 1000;
const PICTURES_AT_ONCE = 60; // digests that fit into an address

/**
 * A photo with what it shows. Without a file it is one that the server knows.
 * @typedef {{digest: string, labels: string[], file?: File}} Photo
 * @typedef {{digest: string, name: string | null, labels: string[], predicted: string[] | null,
 *   probability: number | null, thumbnail?: string}} Example
 * @typedef {{digest: string, labels: string[], suggested: string[], probability: number}} LabelIssue
 * @typedef {{label: string, examples: number, accuracy: number | null}} ClassResult
 * @typedef {{version: number, task_type: string, classes: ClassResult[], total: number,
 *   leave_one_out: {accuracy: number, low: number, high: number, images: number, correct: number} | null,
 *   label_issues: LabelIssue[], examples: Example[]}} Taught
 */

/** Photos that cannot be read: nothing was published. */
export class UnreadablePhotos extends Error {
  /** @param {Map<string, string>} reasons by digest */
  constructor(reasons) {
    super("Some photos cannot be read.");
    this.reasons = reasons;
  }
}

/** @param {any} manifest */
export function isTaught(manifest) {
  return Boolean(manifest?.taught);
}

/**
 * All examples of a task; null if the task does not exist.
 * @param {string} task
 * @returns {Promise<Taught | null>}
 */
export async function examplesOf(task) {
  const list = (/** @type {number} */ offset) =>
    json(taskPath(task, `examples?limit=${LISTED}&offset=${offset}`));
  try {
    const found = await list(0);
    while (found.examples.length < found.total) {
      const more = (await list(found.examples.length)).examples;
      if (!more.length) break; // some were removed in the meantime
      found.examples.push(...more);
    }
    for (const example of found.examples) rememberExample(example);
    return found;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}

/** @type {Set<string>} Examples whose pictures were fetched; some have none. */
const requested = new Set();

/**
 * Fetch the pictures of examples that this page has not seen.
 * @param {string} task
 * @param {number} version
 * @param {string[]} digests
 */
export async function fetchPictures(task, version, digests) {
  const missing = [...new Set(digests)].filter((digest) => !hasPicture(digest) && !requested.has(digest));
  for (const digest of missing) requested.add(digest);
  for (let at = 0; at < missing.length; at += PICTURES_AT_ONCE) {
    const query = new URLSearchParams({ version: String(version), thumbnails: "true" });
    for (const digest of missing.slice(at, at + PICTURES_AT_ONCE)) query.append("digest", digest);
    const { examples } = await json(taskPath(task, `examples?${query}`));
    await Promise.all(examples.map(rememberExample));
  }
}

/**
 * Teach photos as one version: in one request, or uploaded in parts and then published.
 * @param {string} task
 * @param {Photo[]} photos
 * @param {{newKind?: string, sent?: (photos: number) => void, classes?: string[], templates?: string[],
 *   keepPictures?: boolean}} [options]
 *   newKind: of a task that must not exist; sent: so many have arrived; classes: names to be read by
 *   the text tower
 * @returns {Promise<any>} the published version; UnreadablePhotos if there are any
 */
export async function teach(task, photos, options = {}) {
  const { newKind, sent = () => {}, classes = [], templates = [], keepPictures = true } = options;
  /** @type {Record<string, string>} */
  const headers = newKind ? { "If-None-Match": "*" } : {};
  const names = classes.length ? { classes, templates } : {};
  const parts = [...batches(photos)];
  const query = new URLSearchParams(keepPictures ? {} : { keep_pictures: "false" });
  const path = () => taskPath(task, `examples?${query}`);
  try {
    if (parts.length < 2) return await send(path(), photos, headers, { task_type: newKind, ...names });
  } catch (error) {
    throw error instanceof Problem && error.unreadable.length
      ? new UnreadablePhotos(new Map(error.unreadable.map((each) => [photos[each.index].digest, each.reason])))
      : error;
  }
  query.set("upload", randomId());
  try {
    await upload(path(), parts, headers, sent);
    query.set("publish", "true");
    if (classes.length) return await send(path(), [], headers, { task_type: newKind, ...names });
    if (newKind) query.set("task_type", newKind);
    return await json(path(), { method: "POST", headers });
  } catch (error) {
    query.delete("publish");
    await request(path(), { method: "DELETE" }).catch(() => {}); // what is left expires
    throw error instanceof Problem
      ? new Problem(error.title, `${error.detail} Nothing was taught.`, error)
      : error;
  }
}

/**
 * @param {string} path
 * @param {Photo[][]} parts
 * @param {Record<string, string>} headers
 * @param {(photos: number) => void} sent
 */
async function upload(path, parts, headers, sent) {
  /** @type {Map<string, string>} */
  const reasons = new Map();
  for (const part of parts) {
    const { unreadable } = await send(path, part, headers);
    for (const { index, reason } of unreadable) reasons.set(part[index].digest, reason);
    sent(part.length);
  }
  if (reasons.size) throw new UnreadablePhotos(reasons);
}

function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/**
 * Say what a photo shows: a taught task learns it at once, a trained one at its next training.
 * @param {string} task
 * @param {Photo} photo
 * @param {boolean} toTaught
 */
export function correct(task, photo, toTaught) {
  return send(taskPath(task, toTaught ? "examples" : "corrections"), [photo]);
}

/**
 * @param {string} task
 * @param {string} digest
 */
export function forget(task, digest) {
  return json(taskPath(task, `examples?digest=${encodeURIComponent(digest)}`), {
    method: "DELETE",
  });
}

/**
 * Undo a change, unless the task has changed since.
 * @param {string} task
 * @param {number} version the one that the change made
 */
export async function takeBack(task, version) {
  const response = await request(taskPath(task));
  const now = await response.json();
  if (now.aliases.default !== version) {
    throw new Problem("Changed in the meantime", `${task} is at version ${now.aliases.default} now.`);
  }
  const headers = { "If-Match": response.headers.get("ETag") ?? "*" };
  return json(taskPath(task, "rollback"), { method: "POST", headers });
}

/**
 * @param {string} path
 * @param {Photo[]} photos
 * @param {Record<string, string>} [headers]
 * @param {{task_type?: string, classes?: string[], templates?: string[]}} [beside] the photos
 */
async function send(path, photos, headers = {}, beside = {}) {
  const examples = await Promise.all(
    photos.map(async ({ digest, labels, file }) =>
      file ? { b64: await base64(file), labels, name: file.name } : { digest, labels },
    ),
  );
  try {
    return await json(path, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers },
      body: JSON.stringify({ examples, ...beside }),
    });
  } catch (error) {
    throw error instanceof Problem ? withNames(error, photos) : error;
  }
}

/**
 * The server knows photos by their place in the request, people by their names.
 * @param {Problem} problem
 * @param {Photo[]} photos
 */
function withNames(problem, photos) {
  const detail = problem.detail.replace(/examples[.[](\d+)\]?(?:\.b64)?/gi, (place, at) =>
    photos[at] ? nameOf(photos[at].digest) : place,
  );
  return new Problem(problem.title, detail, problem);
}

/** @param {Photo[]} photos */
function* batches(photos) {
  /** @type {Photo[]} */
  let batch = [];
  let bytes = 0;
  for (const photo of photos) {
    const more = photo.file?.size ?? 0;
    if (batch.length >= AT_ONCE || (batch.length && bytes + more > BYTES_AT_ONCE)) {
      yield batch;
      [batch, bytes] = [[], 0];
    }
    batch.push(photo);
    bytes += more;
  }
  if (batch.length) yield batch;
}
