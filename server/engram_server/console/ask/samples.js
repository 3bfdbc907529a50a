// @ts-check
/** The sample photos, and the demo task that has each photo's class. */

import { json } from "../api.js";
import { h } from "../ui.js";

// Name, text, and the demo task with the photo's class.
const SAMPLES = [
  ["cat", "A tabby cat", "cifar10"],
  ["dog", "A German shepherd", "cifar10"],
  ["parrot", "A scarlet macaw", "cifar10"],
  ["horse", "A horse", "cifar10"],
  ["butterfly", "A butterfly", "cifar100"],
  ["flower", "A dahlia", "flowers"],
  ["bee", "A honey bee", "cifar100"],
  ["camel", "A camel", "cifar100"],
  ["castle", "A castle", "cifar100"],
  ["bridge", "A suspension bridge", "cifar100"],
  ["coffee", "A cup of espresso", "cifar100"],
  ["rocket", "A rocket on its pad", "cifar100"],
];

/**
 * A button for each sample.
 * @param {(file: File, tasks: string[]) => void} choose
 */
export function sampleButtons(choose) {
  return SAMPLES.map(([name, text, task]) => {
    const address = new URL(`console/samples/${name}.jpg`, document.baseURI);
    const add = async () => {
      const [blob, tasks] = await Promise.all([
        fetch(address).then((response) => response.blob()),
        fittingTasks(task),
      ]);
      choose(new File([blob], `${name}.jpg`, { type: "image/jpeg" }), tasks);
    };
    const image = h("img", { src: address.href, alt: text, width: 72, height: 54, loading: "lazy" });
    return h("button", { type: "button", class: "thumbnail", title: text, onclick: add }, image);
  });
}

/**
 * The tasks that fit a sample; none, which means every task, if the demo task is not served.
 * @param {string} task
 */
async function fittingTasks(task) {
  const names = ["base", task, "quality"];
  const ready = await Promise.all(names.map(isReady));
  return ready[1] ? names.filter((_, place) => ready[place]) : [];
}

/** @param {string} task */
async function isReady(task) {
  const query = new URLSearchParams({ q: task, limit: "100" });
  const { tasks } = await json(`tasks?${query}`).catch(() => ({ tasks: [] }));
  return tasks.some((/** @type {any} */ each) => each.task === task && each.status === "ready");
}
