// @ts-check
/** The changes of a task, newest first. */

import { h, percent, plural, time } from "../ui.js";

/** @param {any} entry */
function describe(entry) {
  const versions = (entry.versions ?? []).join(", ");
  const aliases = (entry.aliases ?? []).join(", ");
  switch (entry.kind) {
    case "publish":
      return `published version ${entry.version}${aliases && ` as ${aliases}`}`;
    case "alias":
      if (entry.version === null) return `removed ${aliases}`;
      if (entry.evidence) return promoted(entry);
      return `${entry.rollback ? "rolled" : "moved"} ${aliases} ${entry.rollback ? "back " : ""}to version ${entry.version}`;
    case "canary":
      if (entry.version === null) return `ended the canary of ${entry.alias}`;
      return `sent ${percent(entry.share)} of ${entry.alias} to version ${entry.version}`;
    case "retire":
      return entry.whole ? "retired the task" : `retired version ${versions}`;
    case "purge":
      return entry.whole ? "purged the task" : `purged version ${versions}`;
    default:
      return `restored version ${versions}`;
  }
}

/** @param {any} entry */
function promoted({ version, evidence }) {
  const agreed = evidence.agreement === null ? "" : `${percent(evidence.agreement)} agreement on `;
  return `promoted version ${version} on evidence: ${agreed}${plural(evidence.images, "image")}`;
}

/** @param {any[]} entries */
export function history(entries) {
  const items = entries.map((each) =>
    h(
      "li",
      {},
      time(each.time),
      h("span", {}, describe(each), each.note && h("span", { class: "hint" }, ` · ${each.note}`)),
      h("span", { class: "hint" }, each.actor),
    ),
  );
  return h(
    "details",
    { class: "panel" },
    h("summary", {}, "History"),
    h("ol", { class: "history" }, ...items),
  );
}
