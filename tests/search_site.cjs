// Queries the built site with its own search worker: node search_site.cjs SITE QUERY…
// Prints a JSON object: the locations found for each query, best first.
const fs = require("node:fs");
const path = require("node:path");
const vm = require("node:vm");

const [site, ...queries] = process.argv.slice(2);
const folder = path.join(site, "assets", "javascripts", "workers");
const worker = fs.readdirSync(folder).find((name) => name.startsWith("search"));
const index = JSON.parse(fs.readFileSync(path.join(site, "search.json"), "utf8"));

let answer;
globalThis.self = globalThis;
globalThis.postMessage = (message) => answer(message);
vm.runInThisContext(fs.readFileSync(path.join(folder, worker), "utf8"));

function send(type, data) {
  return new Promise((resolve) => {
    answer = resolve;
    globalThis.onmessage({ data: { type, data } });
  });
}

(async () => {
  await send(0, index);
  const found = {};
  for (const query of queries) {
    const { data } = await send(2, { input: query });
    found[query] = data.items.map((item) => index.items[item.id].location);
  }
  process.stdout.write(JSON.stringify(found));
})();
