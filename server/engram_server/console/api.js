// @ts-check
/** The server's HTTP API, and the key it may ask for. */

const KEY = "engram-key";
export const TASK_NAME = /^(?:[a-z0-9][a-z0-9._-]{0,62}\/)?[a-z0-9][a-z0-9._-]{0,62}$/;

/**
 * A photo of a request that cannot be read, by its place in the request.
 * @typedef {{index: number, name: string | null, reason: string}} Unreadable
 */

/** An error response: an RFC 9457 problem document. */
export class Problem extends Error {
  /**
   * @param {string} title
   * @param {string} detail
   * @param {{status?: number, type?: string, requestId?: string, retryAfter?: number | null,
   *   unreadable?: Unreadable[]}} [more]
   */
  constructor(title, detail, more = {}) {
    super(`${title}: ${detail}`);
    const { status = 0, type = "", requestId = "", retryAfter = null, unreadable = [] } = more;
    this.title = title;
    this.detail = detail;
    this.status = status;
    this.type = type;
    this.requestId = requestId;
    this.unreadable = unreadable;
    this.retryAfter = retryAfter; // in seconds; null: the same request would fail again
  }

  /** The last part of the problem type, for example "unknown-task". */
  get kind() {
    return this.type.replace(/^urn:engram:problem:/, "");
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY),
  /** @param {string} value */
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/** @type {(problem: Problem) => Promise<boolean>} */
let askForKey = async () => false;

/**
 * Set the function that asks the user for a key; it resolves to whether there is a new one.
 * @param {(problem: Problem) => Promise<boolean>} ask
 */
export function onKeyRequired(ask) {
  askForKey = ask;
}

/** @type {() => void} */
let reportUnreachable = () => {};

/**
 * Set the function that is called when the server does not answer.
 * @param {() => void} report
 */
export function onUnreachable(report) {
  reportUnreachable = report;
}

/**
 * A request that succeeds, or a Problem. Asks for a key, and tries again, when one is required.
 * @param {string} path relative to the page
 * @param {RequestInit} [options]
 * @returns {Promise<Response>}
 */
export async function request(path, options = {}) {
  for (;;) {
    const response = await send(path, options);
    if (response.ok) return response;
    const problem = await readProblem(response);
    const needsKey = response.status === 401 || problem.kind === "not-permitted";
    if (!needsKey || !(await askForKey(problem))) throw problem;
  }
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>}
 */
export async function json(path, options) {
  return (await request(path, options)).json();
}

/**
 * The path of a task, and of what is below it.
 * @param {string} task
 * @param {string} [below]
 */
export function taskPath(task, below = "") {
  return `tasks/${encodeURIComponent(task)}${below && `/${below}`}`;
}

/**
 * @param {string} path
 * @param {RequestInit} options
 */
async function send(path, options) {
  const headers = new Headers(options.headers);
  const presented = key.get();
  if (presented) headers.set("Authorization", `Bearer ${presented}`);
  try {
    return await fetch(new URL(path, document.baseURI), { ...options, headers });
  } catch (error) {
    if (options.signal?.aborted) throw error;
    reportUnreachable();
    throw new Problem(
      "The server does not answer",
      `Nothing came back from ${location.host}. It may have stopped, or the network may be down.`,
    );
  }
}

/** @param {Response} response */
async function readProblem(response) {
  const status = response.status;
  try {
    const document = await response.json();
    const { title, detail, type, unreadable } = document;
    if (title && detail) {
      const wait = response.headers.get("Retry-After");
      const retryAfter = wait === null ? null : Number(wait) || 1;
      const more = { status, type, requestId: document.request_id, retryAfter, unreadable };
      return new Problem(title, detail, more);
    }
  } catch {
    // Not a problem document: something between us and the server answered.
  }
  return new Problem(`Status ${status}`, response.statusText || "There was no explanation.", {
    status,
  });
}
