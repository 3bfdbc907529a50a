/** The body of a prediction, by what its images are. */

import type { Digest, Image } from "./types.js";

export interface Body {
  content: BodyInit;
  /** Undefined for a form: fetch adds its boundary. */
  type: string | undefined;
}

const CHUNK_BYTES = 0x8000; // as many arguments as every engine accepts

/** One image is sent as it is, several as a form, and digests as JSON. */
export async function encode(images: readonly Image[]): Promise<Body> {
  const [first, ...others] = images;
  if (first === undefined) throw new TypeError("Send at least one image.");
  if (images.some(isDigest)) {
    const content = JSON.stringify({ images: await Promise.all(images.map(toJson)) });
    return { content, type: "application/json" };
  }
  if (others.length === 0) return { content: toBlob(first), type: "application/octet-stream" };
  const form = new FormData();
  for (const image of images) form.append("image", toBlob(image), "image");
  return { content: form, type: undefined };
}

function isDigest(image: Image): image is Digest {
  return typeof image === "string";
}

function toBlob(image: Image): Blob {
  if (image instanceof Blob) return image;
  return new Blob([image as BlobPart]);
}

async function toJson(image: Image): Promise<{ digest: Digest } | { b64: string }> {
  if (isDigest(image)) return { digest: image };
  const bytes = new Uint8Array(await toBlob(image).arrayBuffer());
  let text = "";
  for (let start = 0; start < bytes.length; start += CHUNK_BYTES) {
    text += String.fromCharCode(...bytes.subarray(start, start + CHUNK_BYTES));
  }
  return { b64: btoa(text) };
}
