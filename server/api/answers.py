"""The engine's answers as JSON."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from server.api.schemas import Explanation, Returned
from server.engine.engine import Engine
from server.engine.scores import best
from server.engine.types import Floats, ImageAnswer, PredictAnswer, TaskAnswer, Timings

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a caller wants the answers."""

    top_k: int
    threshold: float
    returned: Returned
    explain: Explanation | None = None


def predict_json(answer: PredictAnswer, wanted: Wanted) -> Json:
    """The body of an answer, as DESIGN and `schemas.PredictResult` have it."""
    return {
        "generation": answer.generation,
        "backbone": short_name(answer.backbone),
        "images": [_image(image, wanted) for image in answer.images],
        "timings_ms": timings_ms(answer.timings),
    }


def view_json(engine: Engine) -> Json:
    """How an image becomes the patches of a grid, for drawing it on the image."""
    preprocessing = engine.backbone.preprocessing.to_json()
    patch = list(engine.backbone.geometry.patch_size)
    return {"resize": preprocessing["resize"], "crop": preprocessing["crop"], "patch": patch}


def server_timing(timings: Timings) -> str:
    """The value of the Server-Timing header, which browsers draw."""
    return ", ".join(f"{name};dur={value}" for name, value in timings_ms(timings).items())


def timings_ms(timings: Timings) -> dict[str, float]:
    return {
        "queue": round(timings.queue * 1000, 3),
        "decode": round(timings.decode * 1000, 3),
        "forward": round(timings.forward * 1000, 3),
        "total": round(timings.total * 1000, 3),
    }


def short_name(backbone: str) -> str:
    """The last part of a folder or hub name: where a model lies on this machine is nobody's."""
    return backbone.rstrip("/").rpartition("/")[2] or backbone


def _image(image: ImageAnswer, wanted: Wanted) -> Json:
    tasks = {ref: _task(answer, wanted) for ref, answer in image.tasks.items()}
    return {"digest": image.digest, "cache": image.cache, "tasks": tasks}


def _task(answer: TaskAnswer, wanted: Wanted) -> Json:
    if answer.attention is None:
        return _answer(answer, wanted)
    return {**_answer(answer, wanted), "attention": _attention(answer.attention)}


def _answer(answer: TaskAnswer, wanted: Wanted) -> Json:
    version, problem = answer.served.version, answer.served.problem
    if wanted.returned == "logits":
        return {"version": version, "logits": _numbers(answer.logits)}
    if wanted.returned == "embedding":
        assert answer.features is not None, "features were asked for"
        return {"version": version, "embedding": _numbers(answer.features)}
    if problem == "embedding":
        return {"version": version, "embedding": _numbers(answer.logits)}
    if problem == "regression":
        return {"version": version, "values": _numbers(answer.logits)}
    threshold = wanted.threshold if problem == "multi_label" else None
    predictions = [
        {"label": each.label, "index": each.index, "score": rounded(each.score)}
        for each in best(answer, wanted.top_k, threshold)
    ]
    return {"version": version, "predictions": predictions}


def _attention(grid: Floats) -> Json:
    # Rounded all at once: there are hundreds of them for each task.
    rounded = np.round(grid.astype(np.float64), 6)
    return {"on_patches": round(float(rounded.sum()), 6), "grid": rounded.tolist()}


def _numbers(values: Floats) -> list[float]:
    return [rounded(value) for value in _floats(values)]


def _floats(values: Floats) -> Iterable[float]:
    found: list[float] = values.tolist()
    return found


def rounded(value: float) -> float:
    """All a float32 holds; the digits beyond are of its conversion, not of the answer."""
    return float(f"{value:.7g}")
