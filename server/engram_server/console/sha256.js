// @ts-check
/**
 * SHA-256, by which the server names photos. The browser's own is there on https and localhost only,
 * and a phone that teaches a server in the same room has neither.
 */

const PRIMES = firstPrimes(64);
const ROUNDS = Int32Array.from(PRIMES, (prime) => fraction(Math.cbrt(prime)));
const START = Int32Array.from(PRIMES.slice(0, 8), (prime) => fraction(Math.sqrt(prime)));

/**
 * The digest of a photo as the server writes it. The browser computes it, where it can, without
 * blocking the page.
 * @param {Blob} blob
 */
export async function digestOf(blob) {
  const bytes = new Uint8Array(await blob.arrayBuffer());
  if (!globalThis.crypto?.subtle) return `sha256:${sha256(bytes)}`;
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return `sha256:${[...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

/**
 * @param {Uint8Array<ArrayBuffer>} bytes
 * @returns {string} in hexadecimal digits
 */
export function sha256(bytes) {
  const state = START.slice();
  const whole = bytes.length - (bytes.length % 64);
  const body = new DataView(bytes.buffer, bytes.byteOffset, bytes.length);
  for (let at = 0; at < whole; at += 64) mix(state, body, at);
  const last = ending(bytes.subarray(whole), bytes.length);
  for (let at = 0; at < last.byteLength; at += 64) mix(state, last, at);
  return [...state].map((word) => (word >>> 0).toString(16).padStart(8, "0")).join("");
}

/**
 * The rest of the message, a bit, zeros, and the length of the message in bits.
 * @param {Uint8Array} rest
 * @param {number} length
 */
function ending(rest, length) {
  const padded = new Uint8Array(rest.length < 56 ? 64 : 128);
  padded.set(rest);
  padded[rest.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setUint32(padded.length - 8, Math.floor(length / 2 ** 29));
  view.setUint32(padded.length - 4, (length << 3) >>> 0);
  return view;
}

const words = new Int32Array(64);

/**
 * @param {Int32Array} state
 * @param {DataView} block
 * @param {number} at
 */
function mix(state, block, at) {
  for (let i = 0; i < 16; i++) words[i] = block.getInt32(at + 4 * i);
  for (let i = 16; i < 64; i++) {
    const x = words[i - 15];
    const y = words[i - 2];
    const low = rotateRight(x, 7) ^ rotateRight(x, 18) ^ (x >>> 3);
    const high = rotateRight(y, 17) ^ rotateRight(y, 19) ^ (y >>> 10);
    words[i] = words[i - 16] + low + words[i - 7] + high;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 64; i++) {
    const choice = (e & f) ^ (~e & g);
    const sumE = rotateRight(e, 6) ^ rotateRight(e, 11) ^ rotateRight(e, 25);
    const one = (h + sumE + choice + ROUNDS[i] + words[i]) | 0;
    const majority = (a & b) ^ (a & c) ^ (b & c);
    const two = (rotateRight(a, 2) ^ rotateRight(a, 13) ^ rotateRight(a, 22)) + majority;
    h = g;
    g = f;
    f = e;
    e = (d + one) | 0;
    d = c;
    c = b;
    b = a;
    a = (one + two) | 0;
  }
  for (const [i, word] of [a, b, c, d, e, f, g, h].entries()) state[i] += word;
}

/**
 * @param {number} word
 * @param {number} bits
 */
function rotateRight(word, bits) {
  return (word >>> bits) | (word << (32 - bits));
}

/** @param {number} value */
function fraction(value) {
  return ((value - Math.floor(value)) * 2 ** 32) | 0;
}

/** @param {number} count */
function firstPrimes(count) {
  /** @type {number[]} */
  const found = [];
  for (let n = 2; found.length < count; n++) if (found.every((prime) => n % prime)) found.push(n);
  return found;
}
