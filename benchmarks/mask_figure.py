"""Draw which token attends to which: the picture of docs/explanation/masked-pass.md.

python -m benchmarks.mask_figure docs/images/attention-mask.svg
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

PATCHES, MEMORY_TOKENS = 6, 2
# Each task and what it extends.
TASKS: dict[str, tuple[str, ...]] = {"birds": (), "damage": (), "owls": ("birds",)}

CELL, GAP, GROUP_GAP, SECTION_GAP = 26, 2, 10, 30
LEFT, TOP, WIDTH, HEIGHT = 100, 108, 700, 490
HEADINGS = {"patch": "the image", "class": "class tokens", "memory": "memory of the layer"}
# Both schemes paint a background: the page around the picture may use the other scheme.
STYLE = """
svg { --ground: #ffffff; --ink: #2b333d; --faint: #d5dbe2; --image: #1f6feb; --own: #b3541e; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #0d1117; --ink: #d5dbe2; --faint: #323b46; --image: #6ba4f8; --own: #e8935c; }
}
text { fill: var(--ink); font: 13px system-ui, sans-serif; }
.title { font-size: 15px; font-weight: 600; }
.strong { font-weight: 600; }
.ground { fill: var(--ground); }
.none { fill: none; stroke: var(--faint); }
.image { fill: var(--image); }
.own { fill: var(--own); }
.inherited { fill: none; stroke: var(--own); stroke-width: 3; }
"""

Seen = Literal["none", "image", "own", "inherited"]


class Token(NamedTuple):
    """A row or a column; the image's own tokens belong to no task."""

    kind: Literal["patch", "CLS", "class", "memory"]
    task: str | None


class Group(NamedTuple):
    """Tokens side by side under one name."""

    name: str
    tokens: list[Token]


def query_groups() -> list[Group]:
    return [
        Group("patches", [Token("patch", None)] * PATCHES),
        Group("CLS", [Token("CLS", None)]),
        *(Group(name, [Token("class", name)]) for name in TASKS),
    ]


def key_groups() -> list[Group]:
    memory = [Group(name, [Token("memory", name)] * MEMORY_TOKENS) for name in TASKS]
    return [*query_groups(), *memory]


def seen(query: Token, key: Token) -> Seen:
    """One cell of the table: what the key is to the query."""
    if key.task is None:
        return "image"
    if query.task is None:
        return "none"
    if key.task == query.task:
        return "own"
    return "inherited" if key.task in TASKS[query.task] else "none"


def placed(groups: list[Group], start: int) -> Iterator[tuple[Group, list[int]]]:
    """Each group and where its tokens begin: the image, class tokens and memory stand apart."""
    before = None
    for group in groups:
        kind = group.tokens[0].kind
        if before is not None:
            start += SECTION_GAP if kind in HEADINGS and kind != before else GROUP_GAP
        places = [start + place * CELL for place in range(len(group.tokens))]
        yield group, places
        start, before = places[-1] + CELL, kind


def draw() -> str:
    rows, columns = list(placed(query_groups(), TOP)), list(placed(key_groups(), LEFT))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>The attention mask: rows are tokens that ask, columns what they attend to</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}"/>',
        _text(LEFT - 70, 30, "Who attends to whom: a row attends to its coloured columns", "title"),
        *(_row_name(group, places) for group, places in rows),
        *_column_names(columns),
    ]
    for row_group, row_places in rows:
        for column_group, column_places in columns:
            parts += [
                _cell(x, y, seen(query, key))
                for query, y in zip(row_group.tokens, row_places, strict=True)
                for key, x in zip(column_group.tokens, column_places, strict=True)
            ]
    bottom = rows[-1][1][-1] + CELL
    return "\n".join([*parts, *_legend(bottom + 34), "</svg>", ""])


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


def _row_name(group: Group, places: list[int]) -> str:
    return _text(LEFT - 12, (places[0] + places[-1] + CELL) / 2 + 4, group.name, anchor="end")


def _column_names(columns: list[tuple[Group, list[int]]]) -> Iterator[str]:
    """Names of the columns, slanted where they are longer than their column is wide."""
    headings = dict(HEADINGS)
    for group, places in columns:
        kind = group.tokens[0].kind
        if kind in headings:
            yield _text(places[0], 56, headings.pop(kind), "strong")
        middle = (places[0] + places[-1] + CELL) / 2
        if kind == "patch":
            yield _text(middle, TOP - 10, group.name, anchor="middle")
        else:
            turned = f"translate({middle - 2:g} {TOP - 8}) rotate(-32)"
            yield f'<text transform="{turned}">{group.name}</text>'


def _cell(x: float, y: float, kind: Seen) -> str:
    inset = {"none": 0.5, "image": 0, "own": 0, "inherited": 1.5}[kind]
    side = CELL - GAP - 2 * inset
    place = f'x="{x + inset:g}" y="{y + inset:g}" width="{side:g}" height="{side:g}"'
    return f'<rect class="{kind}" {place}/>'


def _legend(y: int) -> Iterator[str]:
    meanings: dict[Seen, str] = {
        "image": "the image's own tokens",
        "own": "the task's own",
        "inherited": "of the task it extends",
        "none": "not seen",
    }
    widths = (204, 156, 208, 0)
    x = LEFT - 70
    for (kind, meaning), width in zip(meanings.items(), widths, strict=True):
        yield _cell(x, y - 18, kind)
        yield _text(x + CELL + 6, y - 1, meaning)
        x += width


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(draw(), encoding="utf-8")
    print(f"written to {args.out}")


if __name__ == "__main__":
    main()
