// @ts-check
/** The example sets of taught tasks, and corrections of trained tasks. */

import { Problem, json, request, taskPath } from "./api.js";
import { base64, nameOf } from "./photos.js";

const AT_ONCE = 32; // photos per request: half of the server's default limit
const BYTES_AT_ONCE = 12_000_000;
const LISTED = 1000;

/**
 * A photo with what it shows. Without a file it is one that the server knows.
 * @typedef {{digest: string, labels: string[], file?: File}} Photo
 * @typedef {{digest: string, labels: string[], suggested: string[], probability: number}} LabelIssue
 * @typedef {{version: number, task_type: string, classes: {label: string, examples: number}[],
 *   leave_one_out: {accuracy: number, low: number, high: number} | null, label_issues: LabelIssue[],
 *   examples: {digest: string, labels: string[]}[]}} Taught
 */

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
    return found;
  } catch (error) {
    if (error instanceof Problem && error.status === 404) return null;
    throw error;
  }
}

/**
 * Teach in as many requests as it takes. Each makes a version, so each has photos of several classes.
 * @param {string} task
 * @param {Photo[]} photos
 * @param {{newKind?: string, taught?: (photos: Photo[]) => void, classes?: string[], templates?: string[]}} [options]
 *   newKind: of a task that must not exist; taught: some are, and what is left may fail;
 *   classes: names to be read by the text tower
 * @returns {Promise<any>} what the last request came to
 */
export async function teach(task, photos, options = {}) {
  const { newKind, taught = () => {}, classes = [], templates = [] } = options;
  const sent = [...batches(mixed(photos))];
  if (classes.length && !sent.length) sent.push([]);
  const names = classes.length ? { classes, templates } : {};
  let last = null;
  for (const batch of sent) {
    /** @type {Record<string, string>} */
    const headers = newKind && !last ? { "If-None-Match": "*" } : {};
    const beside = last ? {} : { task_type: newKind, ...names };
    last = await send(taskPath(task, "examples"), batch, headers, beside);
    taught(batch);
  }
  return last;
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
      file ? { b64: await base64(file), labels } : { digest, labels },
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

/**
 * One of each class in turn.
 * @param {Photo[]} photos
 */
function mixed(photos) {
  /** @type {Map<string, Photo[]>} */
  const byClass = new Map();
  for (const photo of photos) {
    const kind = photo.labels.join("\n");
    if (!byClass.has(kind)) byClass.set(kind, []);
    byClass.get(kind)?.push(photo);
  }
  const classes = [...byClass.values()];
  const rounds = Math.max(0, ...classes.map((some) => some.length));
  return Array.from({ length: rounds }, (_, round) =>
    classes.flatMap((some) => some[round] ?? []),
  ).flat();
}

/** @param {Photo[]} photos */
function* batches(photos) {
  /** @type {Photo[]} */
  let batch = [];
  let bytes = 0;
  for (const photo of photos) {
    const more = photo.file?.size ?? 0;
    // Two at least: a new task has two classes.
    if (batch.length >= AT_ONCE || (batch.length > 1 && bytes + more > BYTES_AT_ONCE)) {
      yield batch;
      [batch, bytes] = [[], 0];
    }
    batch.push(photo);
    bytes += more;
  }
  if (batch.length) yield batch;
}
