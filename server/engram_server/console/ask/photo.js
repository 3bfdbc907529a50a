// @ts-check
/** A photo on the Ask page, and the set of all of them. */

import { cover, decode } from "../photos.js";
import { digestOf } from "../sha256.js";

/**
 * @typedef {import("../answer.js").Answer} Answer
 * @typedef {{digest: string, cache: string, tasks: Record<string, Answer>}} ImageResult
 * @typedef {import("../sources.js").Source} Source
 */

export class Photo {
  /** @param {Source} source */
  constructor(source) {
    this.name = source.name;
    this.size = source.size;
    this.open = source.open;
    /** As the server writes it; empty until the photo was read. */
    this.digest = "";
    /** @type {ImageResult | null} */
    this.result = null;
    /** @type {any} The whole response with attention maps, for the photo that is shown large. */
    this.detail = null;
    /** @type {unknown} Why there is no result. */
    this.problem = null;
    /** @type {Promise<HTMLCanvasElement | null> | null} */
    this.small = null;
  }

  /** The last part of the path. */
  get shortName() {
    return this.name.slice(this.name.lastIndexOf("/") + 1);
  }

  /** A small picture, made once; null if the browser cannot read the format. */
  thumbnail() {
    this.small ??= this.open()
      .then(decode)
      .then(
        (shown) => shown && cover(shown.canvas),
        () => null,
      );
    return this.small;
  }

  /** @param {ImageResult} result */
  accept({ digest, cache, tasks }) {
    const plain = Object.entries(tasks).map(([task, { attention, ...answer }]) => [task, answer]);
    this.result = { digest, cache, tasks: Object.fromEntries(plain) };
    this.digest = digest;
    this.problem = null;
  }

  /** @param {unknown} problem */
  reject(problem) {
    this.result = this.detail = null;
    this.problem = problem;
  }
}

/** The photos in the order they were added, each once. */
export class Photos {
  /** @type {Photo[]} */
  all = [];
  /** Photos that were left out because they were here already. */
  duplicates = 0;
  /** @type {Map<string, Photo>} */
  #byDigest = new Map();

  /** @param {Source[]} sources */
  add(sources) {
    const added = sources.map((source) => new Photo(source));
    this.all.push(...added);
    return added;
  }

  /**
   * Read the digest of a photo. If the same photo is here already, remove this one and return the other.
   * @param {Photo} photo
   * @param {File} file
   * @returns {Promise<Photo>}
   */
  async identify(photo, file) {
    photo.digest ||= await digestOf(file);
    const first = this.#byDigest.get(photo.digest);
    if (!first || first === photo) {
      this.#byDigest.set(photo.digest, photo);
      return photo;
    }
    this.duplicates++;
    this.all = this.all.filter((each) => each !== photo);
    return first;
  }

  /** @param {Set<Photo>} photos */
  remove(photos) {
    this.all = this.all.filter((each) => !photos.has(each));
    for (const { digest } of photos) this.#byDigest.delete(digest);
  }
}
