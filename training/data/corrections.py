"""Corrections that people made while a task was served, applied to the images it is trained on.

A correction knows a photo by the SHA-256 of its file and says what it shows. Where that file is
among the data, its label is the corrected one, in whatever split it is. A correction whose photo is
not among the data changes nothing: put the photo into the folder, in whichever class folder. The
feature that is kept with it is no image: candidates with memory, a class token or adapters read the
image itself, and those that read features would then be compared on other examples than these.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import replace

from task_store.manifest import shown
from training.data.dataset import DataSet, Sample, labels_of
from training.errors import DataError

Corrections = Mapping[str, tuple[str, ...]]  # labels by the digest of a photo


def corrected(data: DataSet, corrections: Corrections, pool: Executor) -> tuple[DataSet, str]:
    """The data with corrected labels, and a sentence on what that changed."""
    if data.problem == "regression":
        raise DataError("corrections are labels, and the data has numbers")
    found = dict(zip(data.samples, pool.map(_digest, data.samples), strict=True))
    changed: dict[Sample, Sample] = {}
    for sample, digest in found.items():
        says = corrections.get(digest or "")
        if says is None or set(says) == set(sample.values):
            continue
        if data.problem == "single_label" and len(says) != 1:
            raise DataError(
                f"a correction gives '{shown(str(sample.path))}' {len(says)} labels, and this "
                f"problem has one"
            )
        changed[sample] = replace(sample, values=says)
    samples = tuple(changed.get(sample, sample) for sample in data.samples)
    at_hand = len(set(found.values()) & set(corrections))
    absent = len(corrections) - at_hand
    note = f"{at_hand} of {len(corrections)} corrections are of photos in the data, and "
    note += f"{len(changed)} labels changed"
    if absent:
        note += f"; {absent} are not used, because their photos are not in the data"
    identity = json.dumps([data.digest, [one.values for one in samples]])
    if not changed:
        return data, note
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()
    labels = labels_of(samples, data.problem)
    return replace(data, samples=samples, labels=labels, digest=f"sha256:{digest}"), note


def _digest(sample: Sample) -> str | None:
    try:
        return f"sha256:{hashlib.sha256(sample.path.read_bytes()).hexdigest()}"
    except OSError:
        return None  # told when the images are read
