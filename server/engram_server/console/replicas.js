// @ts-check
/** The servers of the store, on the page that watches. */

import { json } from "./api.js";
import { byId, h, plural, time } from "./ui.js";

// Each look reads the store: not as often as the metrics.
const EVERY_MS = 10_000;

let next = 0;

/** Show the replicas, unless they were just shown. Throws the errors of the request. */
export async function look() {
  if (performance.now() < next) return;
  next = performance.now() + EVERY_MS;
  const listed = await json("replicas");
  byId("replicas-summary").textContent = summary(listed);
  const newest = Math.max(...listed.replicas.map((/** @type {any} */ each) => each.generation));
  byId("replicas").replaceChildren(
    ...listed.replicas.map((/** @type {any} */ each) => row(each, newest)),
  );
}

/** @param {any} listed */
function summary(listed) {
  if (listed.error) return `Other replicas are unknown: ${listed.error}.`;
  if (!listed.heartbeats) return "Heartbeats are disabled on this server.";
  return `${plural(listed.replicas.length, "server")} on this store.`;
}

/**
 * @param {any} replica
 * @param {number} newest
 */
function row(replica, newest) {
  const behind = replica.generation < newest;
  return h(
    "li",
    { "data-replica": replica.id },
    h(
      "span",
      { class: "name" },
      replica.address ?? replica.hostname,
      replica.process && `, process ${replica.process}`,
      replica.this && h("span", { class: "hint" }, " (this one)"),
    ),
    h(
      "span",
      { class: "badge", "data-state": behind ? "on_demand" : "ready" },
      behind ? "Behind" : "Up to date",
    ),
    h("span", { class: "hint" }, `${replica.backbone}, Engram ${replica.version}`),
    h("span", { class: "hint" }, "since ", time(replica.started)),
    h("span", { class: "hint versions" }, `generation ${replica.generation}`),
  );
}
