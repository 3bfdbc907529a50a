/** The answers of the server, as its OpenAPI document describes them. */

/** Identifies an image that the server has seen: `sha256:` and 64 hexadecimal digits. */
export type Digest = `sha256:${string}`;

/** The bytes of an image file, or the digest of an image whose context is still cached. */
export type Image = Blob | ArrayBuffer | Uint8Array | Digest;

export interface Prediction {
  label: string;
  index: number;
  score: number;
}

/** The attention of a task's class token to each patch in the last layer. */
export interface Attention {
  /** The sum of the grid; the rest is attention to other tokens. */
  on_patches: number;
  /** Rows of patches, from the top. */
  grid: number[][];
}

/** The answer of one task. Its members depend on the task type and on `output`. */
export interface TaskResult {
  /** Null for `base`, the backbone's classifier. */
  version: number | null;
  /** Absent for tasks without an out-of-distribution detector. */
  in_distribution?: boolean;
  /** Of classification tasks, highest score first. */
  predictions?: Prediction[];
  /** Of regression tasks. */
  values?: number[];
  /** With `output: "logits"`. */
  logits?: number[];
  /** Of embedding tasks, and with `output: "embedding"`. */
  embedding?: number[];
  /** With `explain: "attention"`. */
  attention?: Attention;
  /** Why the task has no answer for this image. */
  error?: string;
}

export interface ImageResult {
  /** Identifies the image in later requests. */
  digest: Digest;
  /** Whether the context of the image was cached. */
  cache: "hit" | "miss" | "off";
  /** By the reference in the request. */
  tasks: Record<string, TaskResult>;
}

/** How an upright image is cut into the patches of an attention grid. */
export interface View {
  resize: number | number[] | null;
  crop: number[] | null;
  patch: number[];
}

export interface PredictResult {
  /** The generation of the catalog for all answers. */
  generation: number;
  backbone: string;
  /** In the order of the request. */
  images: ImageResult[];
  /** With `explain: "attention"`. */
  view?: View;
  timings_ms: { queue: number; decode: number; forward: number; total: number };
}

export interface TaskSummary {
  task: string;
  /** The default version; null for `base`. */
  version: number | null;
  /** `on_demand`: loaded by the first request for it. */
  status: "ready" | "on_demand" | "failed" | "retired";
  /** Why it cannot be used. */
  reason: string | null;
  task_type: string;
  classes: number;
  description: string;
  aliases: Record<string, number>;
  /** Live versions. */
  versions: number[];
}

export interface TaskPage {
  generation: number;
  backbone: string;
  tasks: TaskSummary[];
  /** Tasks on all pages. */
  total: number;
  /** The cursor of the next page. */
  next: string | null;
  teams: string[];
}

/** An RFC 9457 problem document. */
export interface ProblemDocument {
  type: string;
  title: string;
  status: number;
  detail: string;
  request_id: string | null;
  /** The affected names. */
  names?: string[];
  /** Similar existing names. */
  suggestions?: Record<string, string>;
  /** The invalid parts of the request. */
  errors?: Array<{ where: string; message: string }>;
}
