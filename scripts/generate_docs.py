"""Generate the reference tables in docs/: `make reference`. With --check, fail if one is stale.

A page marks a table with `<!-- generated: NAME ARGUMENT -->` and `<!-- /generated -->`. Settings
have several tables: `first..next` has those from `first` to just before `next`.
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

from engram_bundle.limits import DEFAULT_LIMITS, BundleLimits
from engram_bundle.schema import DIMENSIONS, TENSORS
from engram_server.api.problems import error_rows
from engram_server.commands.batch import batch
from engram_server.commands.search import search
from engram_server.engine.observer import INSTRUMENTS
from engram_server.observability import metrics as metrics_module
from engram_server.settings import PREFIX, Settings
from engram_training.commands.evaluate import evaluate_bundles
from engram_training.commands.options import option_rows
from engram_training.commands.train import train

REPOSITORY = Path(__file__).resolve().parents[1]
PERFORMANCE = REPOSITORY / "docs" / "reference" / "performance.md"
MARKED = re.compile(
    r"<!-- generated: (?P<name>[\w-]+)(?: (?P<argument>\S+))? -->\n.*?<!-- /generated -->", re.S
)
METRIC_TYPES = {"age": "gauge"}
DEFAULTS = {"backbone": "the embedded one", "decode_threads": "cores"}


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def select(names: Sequence[str], argument: str) -> list[str]:
    """The names from `first` to just before `next`, or to the end: `first..next`."""
    first, _, end = argument.partition("..")
    return list(names[names.index(first) : names.index(end) if end else None])


def settings(argument: str) -> str:
    fields = Settings.model_fields
    rows = (
        (f"`{PREFIX}{name.upper()}`", _default(name), fields[name].description or "")
        for name in select(list(fields), argument)
    )
    return table(("variable", "default", ""), rows)


def _default(name: str) -> str:
    value = Settings.model_fields[name].default
    if name in DEFAULTS:
        return DEFAULTS[name]
    if value is None or value == ():
        return "unset"
    if name.endswith("_bytes"):
        return f"`{value.human_readable()}`"
    if isinstance(value, tuple):
        value = ",".join(value)
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def metrics(_: str) -> str:
    assert metrics_module.REQUESTS in INSTRUMENTS, "importing it declares the metrics of HTTP"
    rows = []
    for each in INSTRUMENTS:
        shown = f"{each.name}_total" if each.kind == "counter" else each.name
        labels = ", ".join(f"`{label}`" for label in each.labels)
        rows.append((f"`{shown}`", METRIC_TYPES.get(each.kind, each.kind), labels, each.doc))
    rows += [
        (f"`{each.name}`", each.kind, f"`{each.labels[0]}`", each.doc)
        for each in (metrics_module.DEVICE_MEMORY, metrics_module.PROCESS_UP)
    ]
    return table(("metric", "type", "labels", ""), rows)


def errors(_: str) -> str:
    rows = ((str(status), f"`{kind}`", meaning) for status, kind, _title, meaning in error_rows())
    return table(("status", "type", "meaning"), rows)


def options(command: Callable[..., None]) -> str:
    rows = ((f"`{row.option}`", row.value, row.help) for row in option_rows(command))
    return table(("option", "value", ""), rows)


def bundle_dimensions(_: str) -> str:
    return table(("symbol", "size"), ((f"`{name}`", each.doc) for name, each in DIMENSIONS.items()))


def bundle_tensors(_: str) -> str:
    rows = (
        (
            f"`{name}`",
            f"`[{', '.join(tensor.shape)}]`",
            ", ".join(tensor.stored_as),
            tensor.presence,
            tensor.doc,
        )
        for name, tensor in TENSORS.items()
    )
    return table(("name", "shape", "stored as", "present", "meaning"), rows)


def bundle_limits(_: str) -> str:
    rows = (
        (f"`{each.name}`", str(getattr(DEFAULT_LIMITS, each.name)), each.metadata["doc"])
        for each in fields(BundleLimits)
    )
    return table(("limit", "value", "applies to"), rows)


def one_pass(batch: str) -> str:
    """The latency of a pass for images of one batch size, as `make bench` published it."""
    row = rf"\| (ViT-B/\d+) \| {batch} \| (\d+) \| ([\d.]+) \|"
    section = (
        PERFORMANCE.read_text(encoding="utf-8").partition("## One pass")[2].partition("\n## ")[0]
    )
    found = {(shape, tasks): ratio for shape, tasks, ratio in re.findall(row, section)}
    shapes = sorted({shape for shape, _ in found}, reverse=True)
    counts = sorted({tasks for _, tasks in found}, key=int)
    rows = ([count, *(found[shape, count] for shape in shapes), count] for count in counts)
    return table(("tasks", *shapes, "N models"), rows)


GENERATORS: dict[str, Callable[[str], str]] = {
    "settings": settings,
    "metrics": metrics,
    "one-pass": one_pass,
    "errors": errors,
    "batch-options": lambda _: options(batch),
    "search-options": lambda _: options(search),
    "train-options": lambda _: options(train),
    "evaluate-options": lambda _: options(evaluate_bundles),
    "bundle-dimensions": bundle_dimensions,
    "bundle-tensors": bundle_tensors,
    "bundle-limits": bundle_limits,
}


def generate(page: str) -> str:
    """The page with every marked table replaced."""

    def replaced(match: re.Match[str]) -> str:
        content = GENERATORS[match["name"]](match["argument"] or "")
        opening = match[0].partition("\n")[0]
        return f"{opening}\n{content}\n<!-- /generated -->"

    return MARKED.sub(replaced, page)


def main(arguments: list[str]) -> None:
    stale = []
    for path in sorted((REPOSITORY / "docs").rglob("*.md")):
        before = path.read_text(encoding="utf-8")
        after = generate(before)
        if after != before:
            stale.append(str(path.relative_to(REPOSITORY)))
            if "--check" not in arguments:
                path.write_text(after, encoding="utf-8")
    if "--check" in arguments and stale:
        sys.exit(f"Out of date: {', '.join(stale)}. Run `make reference`.")


if __name__ == "__main__":
    main(sys.argv[1:])
