// Run by tests/e2e/test_typescript_client.py, which starts the servers that the variables name.

import assert from "node:assert/strict";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { test } from "node:test";
import { EngramClient, EngramError } from "engram-vit";

const { ENGRAM_SERVER, ENGRAM_KEY, SLOW_KEY, PHOTOS } = process.env;
const engram = new EngramClient(ENGRAM_SERVER, { key: ENGRAM_KEY });
const photo = async (name) => new Uint8Array(await readFile(`${PHOTOS}/${name}.jpg`));
const options = { tasks: ["cifar10"], topK: 1 };
const cat = await photo("cat");

/** A server on this machine that answers as a function says. */
async function withServer(answer, work) {
  const requests = [];
  const server = createServer((request, response) => {
    requests.push(request);
    request.resume();
    request.on("end", () => answer(response, requests.length));
  });
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  try {
    await work(`http://127.0.0.1:${server.address().port}`, requests);
  } finally {
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  }
}

const good = (response) => {
  const image = { digest: `sha256:${"0".repeat(64)}`, cache: "miss", tasks: {} };
  response.end(JSON.stringify({ generation: 1, backbone: "x", images: [image] }));
};

test("an image is classified, whatever holds its bytes", async () => {
  for (const image of [cat, new Blob([cat]), cat.buffer]) {
    const { digest, tasks } = await engram.predict(image, options);
    assert.match(digest, /^sha256:[0-9a-f]{64}$/);
    assert.equal(tasks.cifar10.predictions[0].label, "cat");
    assert.equal(tasks.cifar10.predictions.length, 1);
  }
});

test("several images are one request, in order, and a digest stands for an image", async () => {
  const dog = await photo("dog");
  const first = await engram.predictMany([cat, dog], options);
  const labels = first.images.map(({ tasks }) => tasks.cifar10.predictions[0].label);
  assert.deepEqual(labels, ["cat", "dog"]);
  const again = await engram.predictMany([dog, first.images[0].digest], options);
  assert.deepEqual(
    again.images.map(({ digest }) => digest),
    [first.images[1].digest, first.images[0].digest],
  );
  assert.equal(again.images[1].cache, "hit");
});

test("options reach the server", async () => {
  const result = await engram.predictMany([cat], {
    tasks: ["cifar10", "flowers"],
    output: "logits",
    explain: "attention",
    minGeneration: 1,
  });
  const { cifar10, flowers } = result.images[0].tasks;
  assert.equal(cifar10.logits.length, 10);
  assert.equal(flowers.predictions, undefined);
  assert.ok(cifar10.attention.grid.length > 1);
  assert.ok(result.view.patch.length === 2);
  const embedded = await engram.predict(cat, { tasks: ["base"], output: "embedding" });
  assert.ok(embedded.tasks.base.embedding.length > 8);
});

test("an error is the problem document", async () => {
  await assert.rejects(engram.predict(cat, { tasks: ["cifar"] }), (error) => {
    assert.ok(error instanceof EngramError);
    assert.equal(error.status, 404);
    assert.equal(error.kind, "unknown-task");
    assert.deepEqual(error.problem.names, ["cifar"]);
    assert.equal(error.problem.suggestions.cifar, "cifar10");
    assert.match(error.requestId, /^\w+$/);
    return true;
  });
  const anonymous = new EngramClient(ENGRAM_SERVER);
  await assert.rejects(anonymous.tasks(), { status: 401, kind: "key-required" });
});

test("tasks are listed over all pages", async () => {
  const tasks = await engram.tasks();
  assert.ok(tasks.length >= 5);
  assert.ok(tasks.every(({ status }) => status === "ready" || status === "on_demand"));
  const found = await engram.tasks({ search: "cifar100" });
  assert.deepEqual(
    found.map(({ task }) => task),
    ["cifar100"],
  );
  const next = (number) => ({ tasks: [{ task: `t${number}` }], next: number < 3 ? "more" : null });
  await withServer(
    (response, number) => response.end(JSON.stringify(next(number))),
    async (url, requests) => {
      assert.equal((await new EngramClient(url).tasks()).length, 3);
      assert.equal(requests[1].url, "/tasks?cursor=more");
    },
  );
});

test("a stream is in order, with an error in place of an answer", async () => {
  const names = ["cat", "dog", "horse", "bee", "castle"];
  async function* images() {
    for (const name of names) yield await photo(name);
    yield new TextEncoder().encode("not an image");
    yield cat;
  }
  const seen = [];
  for await (const { index, result, error } of engram.stream(images(), options)) {
    assert.equal(index, seen.length);
    seen.push(error?.kind ?? result.tasks.cifar10.predictions[0].label);
  }
  assert.deepEqual(seen.slice(0, 3), ["cat", "dog", "horse"]);
  assert.deepEqual(seen.slice(5), ["unreadable-image", "cat"]);
});

test("a stream has bounded concurrency, reads no further, and aborts what is running", async () => {
  let [running, most, read, closed] = [0, 0, 0, 0];
  const held = [];
  const slow = (response) => {
    most = Math.max(most, ++running);
    response.on("close", () => running--);
    if (held.push(response) === 3) good(held[0]);
  };
  await withServer(slow, async (url, requests) => {
    function* images() {
      try {
        for (;;) {
          read++;
          yield cat;
        }
      } finally {
        closed++;
      }
    }
    for await (const { index } of new EngramClient(url).stream(images(), { concurrency: 3 })) {
      assert.equal(index, 0);
      break;
    }
    assert.deepEqual([most, closed], [3, 1]);
    assert.ok(read <= 4 && requests.length <= 4);
  });
});

test("an answer does not wait for the next image", async () => {
  let next;
  async function* images() {
    yield cat;
    await new Promise((resolve) => {
      next = resolve;
    });
    yield cat;
  }
  const seen = [];
  for await (const { index } of engram.stream(images(), { ...options, concurrency: 8 })) {
    seen.push(index);
    next();
  }
  assert.deepEqual(seen, [0, 1]);
});

test("other problems end a stream", async () => {
  const stream = engram.stream([cat, cat], { tasks: ["none"] });
  await assert.rejects(stream.next(), { kind: "unknown-task" });
});

test("a request over the rate limit of its key is sent again when the server says", async () => {
  const slow = new EngramClient(ENGRAM_SERVER, { key: SLOW_KEY, retries: 0 });
  await slow.predict(cat, options);
  await assert.rejects(slow.predict(cat, options), { status: 429, retryAfter: 1 });
  const patient = new EngramClient(ENGRAM_SERVER, { key: SLOW_KEY });
  assert.ok((await patient.predict(cat, options)).tasks.cifar10);
});

test("503 and lost connections are retried, other errors are not", async () => {
  const failing = (response, number) => {
    if (number === 1) response.destroy();
    else if (number === 2) response.writeHead(503, { "Retry-After": "0" }).end("a proxy");
    else good(response);
  };
  await withServer(failing, async (url, requests) => {
    await new EngramClient(url).predict(cat);
    assert.equal(requests.length, 3);
    assert.ok(requests.every((request) => Number(request.headers["x-deadline-ms"]) <= 30_000));
  });
  const broken = (response) => response.writeHead(500).end();
  await withServer(broken, async (url, requests) => {
    await assert.rejects(new EngramClient(url).predict(cat), {
      status: 500,
      problem: undefined,
      message: "The server answered 500 Internal Server Error",
    });
    assert.equal(requests.length, 1);
  });
  const busy = (response) => response.writeHead(503, { "Retry-After": "0" }).end();
  await withServer(busy, async (url, requests) => {
    await assert.rejects(new EngramClient(url, { retries: 2 }).predict(cat), { status: 503 });
    assert.equal(requests.length, 3);
  });
});

test("it does not wait longer than the timeout", async () => {
  const later = (response) => response.writeHead(503, { "Retry-After": "60" }).end();
  await withServer(later, async (url) => {
    const client = new EngramClient(url, { timeoutMs: 5000 });
    await assert.rejects(client.predict(cat), { status: 503, retryAfter: 60 });
  });
  await withServer(
    () => {},
    async (url) => {
      const client = new EngramClient(url, { timeoutMs: 50 });
      await assert.rejects(client.predict(cat), { name: "TimeoutError" });
    },
  );
});

test("a signal aborts a call, and the pause before the next attempt", async () => {
  const reason = new Error("not needed any more");
  await withServer(
    (response) => response.writeHead(503, { "Retry-After": "20" }).end(),
    async (url) => {
      const stop = new AbortController();
      const call = new EngramClient(url).predict(cat, { signal: stop.signal });
      stop.abort(reason);
      await assert.rejects(call, reason);
    },
  );
});

test("wrong use is said at once", async () => {
  await assert.rejects(engram.predictMany([]), /at least one image/);
  await assert.rejects(engram.stream([cat], { concurrency: 0 }).next(), /concurrency is 0/);
  assert.throws(() => new EngramClient("no url"));
});
