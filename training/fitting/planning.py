"""How many steps fit into the time there is, measured on the run's own first batches."""

import time
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace
from itertools import pairwise

from server.model import Backbone
from training.data.dataset import SplitName
from training.fitting.loop import Loop, Plan
from training.fitting.parts import Part
from training.fitting.variants import WARM_UP_STEPS, Variants

TRIAL_STEPS = 10
# The first ones wait for caches, threads and the first images: they say nothing about the rest.
SLOW_STEPS = 4
# Kept back for the last judgement and for a machine that gets slower.
SPARE = 0.1
# Trying may take no more than this share of the time.
TRIAL_SHARE = 0.1


def steps_within(
    seconds: float,
    backbone: Backbone,
    variants: Variants,
    parts: Mapping[SplitName, Part],
    plan: Plan,
    pool: Executor,
) -> Plan:
    """The plan with as many steps as fit; at least the warm-up.

    The steps tried leave no trace, so that the run can be repeated by giving the epochs this comes
    to.
    """
    before = variants.state()
    train = parts["train"]
    loop = Loop(backbone, variants, train, None, replace(plan, steps=TRIAL_STEPS + 1), pool)
    times = [time.perf_counter()]
    loop.run(
        stop=lambda: time.perf_counter() - times[0] > seconds * TRIAL_SHARE,
        on_step=lambda tick: times.append(time.perf_counter()),
    )
    variants.load(before)
    taken = [end - start for start, end in pairwise(times)]
    steady = sorted(taken[SLOW_STEPS:] or taken[-1:])
    step = steady[len(steady) // 2] if steady else time.perf_counter() - times[0]
    seconds -= time.perf_counter() - times[0]
    per_epoch = plan.steps_per_epoch(len(train))
    epoch = step * per_epoch
    if "val" in parts:
        # Validation has no backward pass and its contexts are mostly kept: a third at most.
        epoch += step * plan.steps_per_epoch(len(parts["val"])) / 3
    epochs = max(0.0, seconds * (1 - SPARE) / epoch)
    steps = int(epochs) * per_epoch if epochs >= 1 else int(epochs * per_epoch)
    return replace(plan, steps=max(WARM_UP_STEPS + 1, steps))
