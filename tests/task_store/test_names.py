"""References to tasks."""

import contextlib

import pytest
from engram_bundle import InvalidName, TaskRef, check_alias, check_task_name, parse_ref
from hypothesis import given
from hypothesis import strategies as st

PART = st.from_regex(r"[a-z0-9][a-z0-9._-]{0,62}", fullmatch=True)
TASK = (PART | st.tuples(PART, PART).map("/".join)).filter(lambda name: name != "base")
LABEL = st.from_regex(r"[a-z][a-z0-9._-]{0,62}", fullmatch=True)


@pytest.mark.parametrize(
    ("text", "ref"),
    [
        ("cifar", TaskRef("cifar")),
        ("cifar@3", TaskRef("cifar", version=3)),
        ("cifar:canary", TaskRef("cifar", alias="canary")),
        ("team/cifar@12", TaskRef("team/cifar", version=12)),
        ("base", TaskRef("base")),
        ("team/base", TaskRef("team/base")),
    ],
)
def test_reference_is_read_and_written(text, ref):
    assert parse_ref(text) == ref
    assert str(ref) == text


@given(TASK, st.none() | st.integers(1, 10**12) | LABEL)
def test_any_reference_survives_the_round_trip(task, which):
    ref = TaskRef(task, version=which) if isinstance(which, int) else TaskRef(task, alias=which)
    assert parse_ref(str(ref)) == ref
    assert check_task_name(task) == task


@pytest.mark.parametrize(
    "text",
    ["", "@1", "a@", "a@0", "a@01", "a@x", "a@-1", "a@1@2", "a:", "a:1", "a:B", "a:b@1", "A", "a b",
     "a//b", "a/b/c", "../a", "base@1", "base:default", "a\n", "a@1\n", "ü", "x" * 64,
     "a@" + "9" * 30],
)  # fmt: skip
def test_invalid_reference_is_rejected(text):
    with pytest.raises(InvalidName) as error:
        parse_ref(text)
    assert "\n" not in str(error.value)


@given(st.text(max_size=80))
def test_any_text_is_a_reference_or_refused(text):
    with contextlib.suppress(InvalidName):
        assert str(parse_ref(text)) == text


def test_base_is_reserved():
    with pytest.raises(InvalidName, match="backbone's own classifier"):
        check_task_name("base")
    assert check_alias("base") == "base"
