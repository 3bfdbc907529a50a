import { encode } from "./bodies.js";
import { EngramError } from "./errors.js";
import { type Attempts, send } from "./retrying.js";
import { inOrder } from "./streaming.js";
import type { Image, ImageResult, PredictResult, TaskPage, TaskSummary } from "./types.js";

export interface ClientOptions {
  /** An API key or an OpenID token. */
  key?: string;
  /** How often a request is sent again after 429, 503 or a lost connection. Default: 3. */
  retries?: number;
  /** For one call, with all its attempts, in milliseconds. Default: 30,000. */
  timeoutMs?: number;
  /** Instead of the global `fetch`, for example for a proxy. */
  fetch?: typeof fetch;
}

export interface CallOptions {
  /** Aborts the call; the server then drops the work. */
  signal?: AbortSignal;
  /** Instead of the client's. The server answers 504 after this time. */
  timeoutMs?: number;
  /** Answer from this generation of the catalog or a later one. */
  minGeneration?: number;
}

export interface PredictOptions extends CallOptions {
  /** Task references, such as `pets`, `pets@3` or `pets:canary`. Default: every ready task. */
  tasks?: readonly string[];
  /** Predictions per task. Default: 5. */
  topK?: number;
  /** For multi-label tasks: omit labels with a lower score. Default: 0.5. */
  threshold?: number;
  /** Default: `scores`. */
  output?: "scores" | "logits" | "embedding";
  /** `attention`: also return the attention map of each task. */
  explain?: "attention";
  /** `hide`: omit the predictions of tasks for which the image is out of distribution. */
  unknown?: "show" | "hide";
}

export interface StreamOptions extends PredictOptions {
  /** Requests at the same time. Default: 4. */
  concurrency?: number;
}

/** The answer for one image of a stream, or why there is none. */
export type Streamed<T extends Image = Image> =
  | { index: number; image: T; result: ImageResult; error?: undefined }
  | { index: number; image: T; result?: undefined; error: EngramError };

export interface TaskFilter extends CallOptions {
  /** Part of the name or of the description. */
  search?: string;
  /** Only tasks of this team: `team/name`. */
  team?: string;
}

// Problems of one image, which do not concern the others of a stream.
const OF_ONE_IMAGE = new Set([
  "batch-failed",
  "context-not-cached",
  "image-too-large",
  "unreadable-image",
]);

type Query = Record<string, string | number | undefined>;

/** A client of one Engram server, or of a load balancer before several. */
export class EngramClient {
  readonly #base: string;
  readonly #headers: Record<string, string>;
  readonly #attempts: Omit<Attempts, "signal">;

  constructor(server: string | URL, options: ClientOptions = {}) {
    this.#base = new URL(server).href.replace(/\/?$/, "/");
    this.#headers = options.key === undefined ? {} : { Authorization: `Bearer ${options.key}` };
    this.#attempts = {
      // Browsers refuse to call a fetch that is detached from its window.
      fetch: options.fetch ?? ((...parts) => fetch(...parts)),
      retries: options.retries ?? 3,
      timeoutMs: options.timeoutMs ?? 30_000,
    };
  }

  /** Run tasks on one image. */
  async predict(image: Image, options: PredictOptions = {}): Promise<ImageResult> {
    const { images } = await this.predictMany([image], options);
    return images[0] as ImageResult;
  }

  /** Run tasks on several images in one request, within the limits of the server. */
  async predictMany(
    images: readonly Image[],
    options: PredictOptions = {},
  ): Promise<PredictResult> {
    const { content, type } = await encode(images);
    const headers: Record<string, string> = type === undefined ? {} : { "Content-Type": type };
    const init = { method: "POST", body: content, headers };
    return this.#send("predict", toQuery(options), options, init);
  }

  /**
   * Run tasks on any number of images, one request each, and yield the answers in order.
   *
   * Problems of an image are yielded as its `error`; others are thrown. Leaving the loop aborts
   * the requests that are running.
   */
  async *stream<T extends Image>(
    images: Iterable<T> | AsyncIterable<T>,
    options: StreamOptions = {},
  ): AsyncGenerator<Streamed<T>, void, undefined> {
    const { concurrency = 4, signal, ...others } = options;
    if (!(concurrency >= 1)) throw new RangeError(`concurrency is ${concurrency}: use 1 or more.`);
    const left = new AbortController();
    const either = signal ? AbortSignal.any([signal, left.signal]) : left.signal;
    const answer = async (image: T, index: number): Promise<Streamed<T>> => {
      try {
        return { index, image, result: await this.predict(image, { ...others, signal: either }) };
      } catch (error) {
        if (!(error instanceof EngramError) || !OF_ONE_IMAGE.has(error.kind ?? "")) throw error;
        return { index, image, error };
      }
    };
    try {
      yield* inOrder(images, concurrency, answer);
    } finally {
      left.abort();
    }
  }

  /** List all tasks that the key may read. */
  async tasks(filter: TaskFilter = {}): Promise<TaskSummary[]> {
    const query: Query = { q: filter.search, team: filter.team };
    const tasks: TaskSummary[] = [];
    let cursor: string | undefined;
    do {
      const page: TaskPage = await this.#send("tasks", { ...query, cursor }, filter);
      tasks.push(...page.tasks);
      cursor = page.next ?? undefined;
    } while (cursor !== undefined);
    return tasks;
  }

  async #send<T>(path: string, query: Query, call: CallOptions, init: RequestInit = {}): Promise<T> {
    const url = new URL(path, this.#base);
    for (const [name, value] of Object.entries(query)) {
      if (value !== undefined) url.searchParams.set(name, String(value));
    }
    const headers = new Headers({ ...this.#headers, ...(init.headers as Record<string, string>) });
    if (call.minGeneration !== undefined) {
      headers.set("X-Min-Generation", String(call.minGeneration));
    }
    const timeoutMs = call.timeoutMs ?? this.#attempts.timeoutMs;
    return send(url, { ...init, headers }, { ...this.#attempts, timeoutMs, signal: call.signal });
  }
}

function toQuery(options: PredictOptions): Query {
  return {
    tasks: options.tasks?.join(","),
    top_k: options.topK,
    threshold: options.threshold,
    return: options.output,
    explain: options.explain,
    unknown: options.unknown,
  };
}
