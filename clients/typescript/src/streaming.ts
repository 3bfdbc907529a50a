/**
 * Runs work on many items with bounded concurrency, and yields the results in order.
 *
 * A result is yielded as soon as it is its turn, also while the next item is awaited.
 */
export async function* inOrder<T, R>(
  items: Iterable<T> | AsyncIterable<T>,
  concurrency: number,
  work: (item: T, index: number) => Promise<R>,
): AsyncGenerator<R, void, undefined> {
  const source = iterate(items);
  const running: Promise<R>[] = [];
  let reading: Promise<IteratorResult<T>> | undefined;
  let index = 0;
  let ended = false;
  try {
    for (;;) {
      if (!ended && running.length < concurrency) reading ??= Promise.resolve(source.next());
      const [oldest] = running;
      if (oldest !== undefined && (reading === undefined || (await isFirst(oldest, reading)))) {
        running.shift();
        yield await oldest;
      } else if (reading !== undefined) {
        const { done, value } = await reading;
        reading = undefined;
        ended = done === true;
        if (!ended) running.push(quiet(work(value, index++)));
      } else {
        return;
      }
    }
  } finally {
    if (!ended) await source.return?.();
  }
}

function iterate<T>(items: Iterable<T> | AsyncIterable<T>): Iterator<T> | AsyncIterator<T> {
  return Symbol.asyncIterator in items ? items[Symbol.asyncIterator]() : items[Symbol.iterator]();
}

/** Whether a promise settles before another, or has settled already. */
function isFirst(one: Promise<unknown>, other: Promise<unknown>): Promise<boolean> {
  const settled = (promise: Promise<unknown>, first: boolean) =>
    promise.then(
      () => first,
      () => first,
    );
  return Promise.race([settled(one, true), settled(other, false)]);
}

/** A promise whose rejection is reported when it is awaited, and not before. */
function quiet<T>(promise: Promise<T>): Promise<T> {
  promise.catch(() => {});
  return promise;
}
