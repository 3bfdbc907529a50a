// @ts-check
/** Reads zip files without unpacking them as a whole: entries are opened one by one. */

import { Problem } from "./api.js";
import { size as readable } from "./ui.js";

const END = 0x06054b50; // "end of central directory" record
const END_BYTES = 22;
const MAX_COMMENT = 65_535;
const ENTRY = 0x02014b50;
const ENTRY_BYTES = 46;
const LOCAL_BYTES = 30;
const ZIP64 = 0xffffffff; // stands for "see the zip64 record"
const [STORED, DEFLATED] = [0, 8];
const MAX_ENTRY_BYTES = 64_000_000; // of one unpacked file

/** @typedef {{name: string, size: number, open: () => Promise<File>}} Entry */

/**
 * List the files of a zip.
 * @param {File} zip
 * @returns {Promise<Entry[]>}
 */
export async function zipEntries(zip) {
  const tail = await view(zip, Math.max(0, zip.size - END_BYTES - MAX_COMMENT), zip.size);
  const end = findEnd(tail);
  if (end < 0) throw new Problem("Unreadable zip file", `${zip.name} is not a complete zip file.`);
  const [length, start] = [tail.getUint32(end + 12, true), tail.getUint32(end + 16, true)];
  if (start === ZIP64 || length === ZIP64) {
    throw new Problem(
      "Zip file too large",
      `${zip.name} is larger than 4 GB. Unpack it and choose the folder.`,
    );
  }
  return [...entries(zip, await view(zip, start, start + length))];
}

/** @param {DataView} tail */
function findEnd(tail) {
  for (let at = tail.byteLength - END_BYTES; at >= 0; at--) {
    if (tail.getUint32(at, true) === END) return at;
  }
  return -1;
}

/**
 * @param {File} zip
 * @param {DataView} directory
 * @returns {Generator<Entry>}
 */
function* entries(zip, directory) {
  const text = new TextDecoder();
  let at = 0;
  while (at + ENTRY_BYTES <= directory.byteLength && directory.getUint32(at, true) === ENTRY) {
    const flags = directory.getUint16(at + 8, true);
    const method = directory.getUint16(at + 10, true);
    const packed = directory.getUint32(at + 20, true);
    const size = directory.getUint32(at + 24, true);
    const nameBytes = directory.getUint16(at + 28, true);
    const others = directory.getUint16(at + 30, true) + directory.getUint16(at + 32, true);
    const offset = directory.getUint32(at + 42, true);
    const name = text.decode(
      new Uint8Array(directory.buffer, directory.byteOffset + at + ENTRY_BYTES, nameBytes),
    );
    at += ENTRY_BYTES + nameBytes + others;
    if (name.endsWith("/")) continue;
    yield { name, size, open: () => unpack(zip, { name, flags, method, packed, size, offset }) };
  }
}

/**
 * @param {File} zip
 * @param {{name: string, flags: number, method: number, packed: number, size: number, offset: number}} entry
 */
async function unpack(zip, { name, flags, method, packed, size, offset }) {
  const reject = (/** @type {string} */ why) => {
    throw new Problem("Unreadable zip entry", `${name} ${why}.`);
  };
  if (flags & 1) reject("is encrypted");
  if (method !== STORED && method !== DEFLATED) reject(`is packed with method ${method}`);
  if (size > MAX_ENTRY_BYTES) reject(`is too large: ${readable(size)}`);
  const local = await view(zip, offset, offset + LOCAL_BYTES);
  if (local.byteLength < LOCAL_BYTES) reject("is damaged");
  const start = offset + LOCAL_BYTES + local.getUint16(26, true) + local.getUint16(28, true);
  const content = zip.slice(start, start + packed);
  const file = name.slice(name.lastIndexOf("/") + 1);
  if (method === STORED) return new File([content], file);
  return new File(await inflate(content, size, () => reject("is damaged")), file);
}

/**
 * @param {Blob} content
 * @param {number} size as the zip states it; more is not read
 * @param {() => void} reject
 */
async function inflate(content, size, reject) {
  /** @type {Uint8Array<ArrayBuffer>[]} */
  const parts = [];
  let total = 0;
  try {
    const reader = content.stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
    for (let next = await reader.read(); !next.done; next = await reader.read()) {
      total += next.value.length;
      if (total > size) break;
      parts.push(next.value);
    }
  } catch {
    reject();
  }
  if (total !== size) reject();
  return parts;
}

/**
 * @param {Blob} blob
 * @param {number} start
 * @param {number} end
 */
async function view(blob, start, end) {
  return new DataView(await blob.slice(start, end).arrayBuffer());
}
