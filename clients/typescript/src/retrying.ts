/** Sends requests that may be repeated: again after 429, 503 and lost connections. */

import { EngramError } from "./errors.js";

const RETRIED = [429, 503];
const FIRST_PAUSE_MS = 250;
const LONGEST_PAUSE_MS = 8000;

export interface Attempts {
  fetch: typeof fetch;
  /** How often a request is sent again. */
  retries: number;
  /** For all attempts and the pauses between them. */
  timeoutMs: number;
  signal: AbortSignal | undefined;
}

/** The body of the first good response, or EngramError. */
export async function send<T>(url: URL, init: RequestInit, attempts: Attempts): Promise<T> {
  const ends = Date.now() + attempts.timeoutMs;
  const timeout = AbortSignal.timeout(attempts.timeoutMs);
  const signal = attempts.signal ? AbortSignal.any([attempts.signal, timeout]) : timeout;
  for (let left = attempts.retries; ; left--) {
    const outcome = await attempt<T>(url, init, attempts.fetch, signal, ends);
    if (!(outcome instanceof Failed)) return outcome;
    const pause = pauseMs(outcome.error, attempts.retries - left);
    // Better the error now than a timeout that says nothing.
    if (!outcome.retryable || left <= 0 || Date.now() + pause >= ends) throw outcome.error;
    await sleep(pause, signal);
  }
}

class Failed {
  constructor(
    readonly error: unknown,
    readonly retryable: boolean,
  ) {}
}

async function attempt<T>(
  url: URL,
  init: RequestInit,
  fetcher: typeof fetch,
  signal: AbortSignal,
  ends: number,
): Promise<T | Failed> {
  const headers = new Headers(init.headers);
  headers.set("X-Deadline-Ms", String(Math.max(1, ends - Date.now())));
  try {
    const response = await fetcher(url, { ...init, headers, signal });
    if (response.ok) return (await response.json()) as T;
    return new Failed(await EngramError.of(response), RETRIED.includes(response.status));
  } catch (error) {
    signal.throwIfAborted();
    return new Failed(error, error instanceof TypeError); // what fetch throws without a response
  }
}

/** The time in `Retry-After`, or exponential backoff with jitter. */
function pauseMs(error: unknown, number: number): number {
    const retryAfter = error instanceof EngramError ? error.retryAfter : undefined;
    if (retryAfter !== undefined) return retryAfter * 1000;
  return Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** number) * (0.5 + Math.random() / 2);
}

function sleep(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    signal.throwIfAborted();
    const stop = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, ms);
    signal.addEventListener("abort", stop, { once: true });
  });
}
