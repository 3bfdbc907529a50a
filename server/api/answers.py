"""The engine's answers as JSON."""

from collections.abc import Iterable
from dataclasses import dataclass

from server.api.schemas import Returned
from server.engine.scores import best
from server.engine.types import Floats, ImageAnswer, PredictAnswer, TaskAnswer, Timings

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a caller wants the answers."""

    top_k: int
    threshold: float
    returned: Returned


def predict_json(answer: PredictAnswer, wanted: Wanted) -> Json:
    """The body of an answer, as DESIGN and `schemas.PredictResult` have it."""
    return {
        "generation": answer.generation,
        "backbone": short_name(answer.backbone),
        "images": [_image(image, wanted) for image in answer.images],
        "timings_ms": timings_ms(answer.timings),
    }


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
        {"label": each.label, "index": each.index, "score": _number(each.score)}
        for each in best(answer, wanted.top_k, threshold)
    ]
    return {"version": version, "predictions": predictions}


def _numbers(values: Floats) -> list[float]:
    return [_number(value) for value in _floats(values)]


def _floats(values: Floats) -> Iterable[float]:
    found: list[float] = values.tolist()
    return found


def _number(value: float) -> float:
    # All a float32 holds; the digits beyond are of its conversion, not of the answer.
    return float(f"{value:.7g}")
