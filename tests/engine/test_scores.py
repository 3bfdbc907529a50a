import numpy as np
import pytest
from engram_server.engine.types import ServedTask, TaskAnswer, class_scores, top_predictions


def answer(logits, task_type="single_label", labels=("a", "b", "c", "d")):
    served = ServedTask("t", 1, None, task_type, labels, {})
    return TaskAnswer(served, np.array(logits, dtype=np.float32), None)


def test_single_label_tasks_give_a_distribution():
    values = class_scores([answer([1.0, 2.0, 3.0, -4.0])])[0]
    assert values.sum() == pytest.approx(1, abs=1e-6)
    assert values.argmax() == 2


def test_multi_label_tasks_give_one_probability_per_label():
    assert class_scores([answer([0, 2, -2, 0], "multi_label")])[0] == pytest.approx(
        [0.5, 0.880797, 0.119203, 0.5], abs=1e-6
    )


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_enormous_logits_overflow_nothing(task_type):
    values = class_scores([answer([1e30, -1e30, 0, 5], task_type)])[0]
    assert np.isfinite(values).all()
    assert values[:2] == pytest.approx([1, 0])


@pytest.mark.parametrize("task_type", ["regression", "embedding"])
def test_other_outputs_are_as_they_are(task_type):
    assert class_scores([answer([1.5, -2, 0, 9], task_type)])[0].tolist() == [1.5, -2, 0, 9]


def test_the_best_come_first_with_their_labels():
    assert [one[:2] for one in top_predictions([answer([0, 3, 1, 2])], 3)[0]] == [
        ("b", 1),
        ("d", 3),
        ("c", 2),
    ]


def test_requesting_more_than_there_are_gives_all():
    assert len(top_predictions([answer([0, 1, 2, 3])], 99)[0]) == 4


def test_equal_scores_keep_the_order_of_the_labels():
    assert [index for _, index, _ in top_predictions([answer([1, 1, 1, 1])], 4)[0]] == [0, 1, 2, 3]


def test_a_threshold_keeps_what_reaches_it():
    assert [
        label
        for label, _, _ in top_predictions([answer([0, 2, -2, 0.1], "multi_label")], 9, 0.5)[0]
    ] == [
        "b",
        "d",
        "a",
    ]


def test_outputs_without_names_are_named_by_number():
    assert top_predictions([answer([0, 1], labels=())], 1)[0][0][0] == "1"


@pytest.mark.parametrize("task_type", ["single_label", "multi_label"])
def test_answers_computed_together_equal_those_computed_alone(task_type):
    random = np.random.default_rng(0)
    answers = [answer(random.normal(size=101) * 9, task_type, ()) for _ in range(33)]
    together = top_predictions(answers, 7)
    assert together == [top_predictions([one], 7)[0] for one in answers]
