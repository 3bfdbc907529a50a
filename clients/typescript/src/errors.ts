import type { ProblemDocument } from "./types.js";

const URN = "urn:engram:problem:";

/** An error response of the server. */
export class EngramError extends Error {
  override readonly name = "EngramError";
  readonly status: number;
  /** Seconds after which the same request may succeed. */
  readonly retryAfter: number | undefined;
  /** The problem document; undefined if something else than the server has answered. */
  readonly problem: ProblemDocument | undefined;

  constructor(message: string, status: number, retryAfter?: number, problem?: ProblemDocument) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.problem = problem;
  }

  /** The last part of the problem type, such as `unknown-task`. */
  get kind(): string | undefined {
    return this.problem?.type.startsWith(URN) ? this.problem.type.slice(URN.length) : undefined;
  }

  /** The id of the request in the logs of the server. */
  get requestId(): string | undefined {
    return this.problem?.request_id ?? undefined;
  }

  static async of(response: Response): Promise<EngramError> {
    const problem = await readProblem(response);
    const message =
      problem === undefined
        ? `The server answered ${response.status} ${response.statusText}`.trim()
        : problem.detail;
    return new EngramError(message, response.status, readRetryAfter(response), problem);
  }
}

async function readProblem(response: Response): Promise<ProblemDocument | undefined> {
  const text = await response.text();
  try {
    const document = JSON.parse(text);
    return typeof document?.type === "string" && typeof document.detail === "string"
      ? document
      : undefined;
  } catch {
    return undefined; // A proxy has answered.
  }
}

/** The header in seconds: proxies may send a date. */
function readRetryAfter(response: Response): number | undefined {
  const header = response.headers.get("Retry-After");
  if (header === null) return undefined;
  const seconds = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isNaN(seconds) ? undefined : Math.max(0, seconds);
}
