// @ts-check
/** Filters, sorts and exports the answers for many photos. Nothing here touches the page. */

import { Problem } from "../api.js";

/**
 * @typedef {import("./photo.js").Photo} Photo
 * @typedef {import("../answer.js").Answer} Answer
 * @typedef {"all" | "unknown" | "uncertain" | "unreadable"} Show
 * @typedef {"added" | "name" | "lowest" | "highest"} Order
 * @typedef {{task: string, show: Show, label: string, order: Order}} View
 *   task: empty for any task; label: empty for any class
 */

export const LOW_CONFIDENCE = 0.5; // top scores below this are uncertain
// As in the CSV of `engram predict`.
const COLUMNS = ["image", "task", "version", "label", "index", "score", "value", "in_distribution", "error"];

/** @param {Answer | undefined} answer */
export function top(answer) {
  return answer?.predictions?.[0] ?? null;
}

/** @param {Photo} photo */
export function reason(photo) {
  if (photo.problem instanceof Problem) return photo.problem.detail;
  return photo.problem ? String(photo.problem) : "";
}

/**
 * All tasks that answered, in the order of the answers.
 * @param {Photo[]} photos
 */
export function tasksOf(photos) {
  return [...new Set(photos.flatMap((photo) => Object.keys(photo.result?.tasks ?? {})))];
}

/**
 * The answers of a photo that the view is about.
 * @param {Photo} photo
 * @param {View} view
 */
function answers(photo, { task }) {
  const all = photo.result?.tasks ?? {};
  return task ? (all[task] ? [all[task]] : []) : Object.values(all);
}

/**
 * @param {Photo[]} photos
 * @param {View} view
 */
export function select(photos, view) {
  const kept = photos.filter((photo) => isShown(photo, view));
  if (view.order === "added") return kept;
  if (view.order === "name") return kept.sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
  const sign = view.order === "lowest" ? 1 : -1;
  const score = new Map(kept.map((photo) => [photo, leastScore(photo, view)]));
  return kept.sort((a, b) => compare(score.get(a) ?? null, score.get(b) ?? null, sign));
}

/**
 * Photos without a score come last.
 * @param {number | null} a
 * @param {number | null} b
 * @param {number} sign
 */
function compare(a, b, sign) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  return sign * (a - b);
}

/**
 * @param {Photo} photo
 * @param {View} view
 */
function leastScore(photo, view) {
  const scores = answers(photo, view).flatMap((answer) => top(answer)?.score ?? []);
  return scores.length ? Math.min(...scores) : null;
}

/**
 * @param {Photo} photo
 * @param {View} view
 */
function isShown(photo, view) {
  if (view.show === "unreadable") return photo.problem !== null;
  return (
    (view.show === "all" && !view.label) ||
    answers(photo, view).some((answer) => matches(answer, view))
  );
}

/**
 * @param {Answer} answer
 * @param {View} view
 */
function matches(answer, { show, label }) {
  const best = top(answer);
  if (show === "unknown" && answer.in_distribution !== false) return false;
  if (show === "uncertain" && !(best && best.score < LOW_CONFIDENCE)) return false;
  return !label || best?.label === label;
}

/**
 * The top labels in the view with their numbers of photos, the most frequent first.
 * @param {Photo[]} photos
 * @param {View} view
 * @returns {[label: string, count: number][]}
 */
export function labelCounts(photos, view) {
  /** @type {Map<string, number>} */
  const counts = new Map();
  for (const photo of photos) {
    const labels = new Set(answers(photo, view).flatMap((answer) => top(answer)?.label ?? []));
    for (const label of labels) counts.set(label, (counts.get(label) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/**
 * One line per photo and task, with the top label; one line for an unreadable photo.
 * @param {Photo[]} photos
 */
export function toCsv(photos) {
  const rows = photos.flatMap(csvLines).map((line) => COLUMNS.map((name) => cell(line[name])));
  return `${[COLUMNS, ...rows].map((row) => row.join(",")).join("\r\n")}\r\n`;
}

/**
 * @param {Photo} photo
 * @returns {Record<string, unknown>[]}
 */
function csvLines(photo) {
  if (photo.problem) return [{ image: photo.name, error: reason(photo) }];
  return Object.entries(photo.result?.tasks ?? {}).map(([task, answer]) => ({
    image: photo.name,
    task,
    version: answer.version,
    ...top(answer),
    in_distribution: answer.in_distribution,
    value: answer.values?.[0],
    error: answer.error,
  }));
}

/** @param {unknown} value */
function cell(value) {
  const text = String(value ?? "");
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * All answers, as `/predict` returns them.
 * @param {Photo[]} photos
 */
export function toJson(photos) {
  const images = photos.map((photo) =>
    photo.problem
      ? { image: photo.name, error: reason(photo) }
      : { image: photo.name, digest: photo.digest, tasks: photo.result?.tasks ?? {} },
  );
  return `${JSON.stringify(images, null, 1)}\n`;
}
