// Type-checked and run by test_generated_client.py against the client that was generated beside it.

import { readFileSync } from "node:fs";
import { client } from "./client/client.gen.js";
import { describeTask, listTasks, predict } from "./client/sdk.gen.js";

const [server, file] = process.argv.slice(2) as [string, string];
client.setConfig({ baseUrl: server });

const b64 = readFileSync(file).toString("base64");
const { data, error } = await predict({
  body: { images: [{ b64 }], tasks: ["cifar10"], top_k: 1 },
  headers: { "X-Deadline-Ms": 20_000 },
});
if (error !== undefined) throw new Error(error.detail);
const result = data.images[0]?.tasks.cifar10;
if (result === undefined) throw new Error("no answer");
const label: string | undefined = result.predictions?.[0]?.label; // absent, never null
const known: number | null = result.version; // null for the backbone's classifier

const wrong = await predict({ body: { images: [{ b64 }], tasks: ["cifar"] } });
const suggested: string | undefined = wrong.error?.suggestions?.cifar;

const listed = await listTasks({ query: { q: "flower", limit: 10 } });
const task = await describeTask({ path: { task: "cifar10" } });
console.log(
  JSON.stringify({
    label,
    known,
    suggested,
    status: wrong.response?.status,
    tasks: listed.data?.tasks.map(({ task }) => task),
    etag: task.response?.headers.get("ETag"),
    classes: task.data?.class_labels?.length,
  }),
);
