// @ts-check
/** Reads the Prometheus text format. */

/** @typedef {{name: string, labels: Record<string, string>, value: number}} Sample */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;

/**
 * @param {string} text
 * @returns {Sample[]}
 */
export function parse(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : LINE.exec(line);
    if (!found) continue;
    const labels = Object.fromEntries(
      [...(found[2] ?? "").matchAll(LABEL)].map((each) => [each[1], each[2]]),
    );
    samples.push({ name: found[1], labels, value: Number(found[3]) });
  }
  return samples;
}

/**
 * The sum of a metric over all series that have these labels.
 * @param {Sample[]} samples
 * @param {string} name
 * @param {Record<string, string>} [labels]
 */
export function total(samples, name, labels = {}) {
  return samples
    .filter(
      (each) =>
        each.name === name &&
        Object.entries(labels).every(([key, value]) => each.labels[key] === value),
    )
    .reduce((sum, each) => sum + each.value, 0);
}

/**
 * The least value of a metric; 0 without one.
 * @param {Sample[]} samples
 * @param {string} name
 */
export function least(samples, name) {
  const values = samples.filter((each) => each.name === name).map((each) => each.value);
  return values.length ? Math.min(...values) : 0;
}
