"""Child processes that publish, run as `python -m tests.task_store.writers`. No torch here.

publish STORE TASK COUNT SEED   publish so many versions and leave
forks STORE                     on each line of stdin, fork a child that publishes until killed

The second never touches the store itself: obstore's threads would not survive the fork, and a fork
is a hundred times quicker to start than a new interpreter.
"""

import dataclasses
import os
import sys

from engram_bundle import TaskBundle
from engram_store import open_store

from tests.bundles import bundle, manifest

_MODEL = bundle(0)


def distinct(number: int) -> TaskBundle:
    return dataclasses.replace(_MODEL, manifest=manifest(description=f"number {number}"))


def publish(location: str, task: str, count: int, seed: int) -> None:
    store = open_store(location, actor=f"writer-{seed}")
    for i in range(count):
        made = distinct(seed * 1_000_000 + i)
        print(store.publish(task, made).version, made.digest, flush=True)


def publish_until_killed(location: str, round_number: int) -> None:
    store = open_store(location, actor=f"round-{round_number}", checkpoint_every=50)
    number = 0
    while True:
        number += 1
        task = f"t{number % 3}"
        made = distinct(round_number * 1_000_000 + number)
        version = store.publish(task, made).version
        # One write of few bytes is whole or absent in a pipe, also when we are killed.
        os.write(1, f"ack {task} {version} {made.digest}\n".encode())


def serve_forks(location: str) -> None:
    print("ready", flush=True)
    for round_number, _ in enumerate(sys.stdin):
        child = os.fork()
        if child == 0:
            publish_until_killed(location, round_number)
        os.write(1, f"pid {child}\n".encode())
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


if __name__ == "__main__":
    mode, location, *rest = sys.argv[1:]
    if mode == "publish":
        publish(location, rest[0], int(rest[1]), int(rest[2]))
    else:
        serve_forks(location)
