"""Damaged, foreign and inconsistent checkpoints are refused, and nothing in them is run."""

import os
import pickle

import pytest
import torch
from engram_training.errors import ForeignCheckpoint, InconsistentCheckpoint, UnreadableCheckpoint

from tests.training.importing.checkpoints import (
    ATTENTION,
    BASE_TOKENS,
    MASKS,
    assert_nothing_written,
    mask,
)

# --- the mask -------------------------------------------------------------------------------------


def edit(row, column, value):
    def change(state):
        for key in MASKS:
            state[key] = state[key].clone()
            state[key][0, row, column] = value

    return change


def edit_one_layer(state):
    state[MASKS[2]] = state[MASKS[2]].clone()
    state[MASKS[2]][0, BASE_TOKENS, BASE_TOKENS + 1] = 0


def replace_masks(value):
    return lambda state: state.update(dict.fromkeys(MASKS, value))


NO = -torch.inf
C1, C2, C3 = BASE_TOKENS, BASE_TOKENS + 1, BASE_TOKENS + 2
M1, M2, M3 = BASE_TOKENS + 3, BASE_TOKENS + 4, BASE_TOKENS + 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (edit_one_layer, "layers 0 and 2 differ on whether C_1 attends to C_2"),
        (edit(C2, M1, NO), "C_2 does not attend to M_1"),
        (edit(C1, M2 + 1, 0), "C_1 attends to M_2"),
        (edit(C3, C3, NO), "C_3 does not attend to C_3"),
        (edit(C3, M3, NO), "C_3 does not attend to M_3"),
        (edit(C1, 5, NO), "C_1 does not attend to patch 5"),
        (edit(0, 0, NO), "CLS does not attend to CLS"),
        (edit(4, C2, 0), "patch 4 attends to C_2"),
        (edit(0, M1, 0), "CLS attends to M_1"),
        (edit(C1, C2, -10000.0), "layer 0 is -10000 for C_1 and C_2"),
        (edit(C1, C2, torch.nan), "layer 0 is nan"),
        (replace_masks(torch.zeros(1, 20, 26)), r"layer 0 is \(1, 20, 26\).* \(1, 20, 27\)"),
        (replace_masks(torch.zeros(20, 27)), r"layer 0 is \(20, 27\)"),
        (replace_masks(mask([[1], [0], []], [1, 4, 2])), "C_1 and C_2 attend to each other"),
        (
            replace_masks(mask([[], [0], [1]], [1, 4, 2])),
            "C_3 attend to C_2 but not to C_1, which C_2 attends to",
        ),
    ],
)
def test_an_unexpected_mask_is_rejected_with_the_reason(state, engram_import, change, message):
    changed = state("extended")
    change(changed)
    with pytest.raises(InconsistentCheckpoint, match=message):
        engram_import(changed)
    assert_nothing_written()


# --- files that are something else ----------------------------------------------------------------


class Hostile:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_refused_and_never_run(tmp_path, state, engram_import, zipped):
    file = tmp_path / "hostile.pt"
    content = state("Sun") | {"x": Hostile()}
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UnreadableCheckpoint, match=r"would run Python code \('posix.mkdir'\)"):
        engram_import(str(file))
    assert_nothing_written()


def test_whole_pickled_model_is_refused(tmp_path, engram_import):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pt")
    with pytest.raises(UnreadableCheckpoint, match=r"Linear.*state_dict"):
        engram_import(str(tmp_path / "model.pt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda good: good[: len(good) // 2], "truncated or damaged"),
        (lambda good: good[:-1], "truncated or damaged"),
        (lambda good: b"", "is empty"),
        (lambda good: b"class names\n", "not a PyTorch checkpoint"),
        (lambda good: pickle.dumps({"a": 1}), "not a PyTorch checkpoint"),
        (lambda good: pickle.dumps(Hostile()), "not a PyTorch checkpoint"),
    ],
    ids=["half", "one-byte-less", "empty", "text", "pickle", "hostile-pickle"],
)
def test_damaged_or_foreign_file_is_refused(
    reproduction, tmp_path, engram_import, content, message
):
    file = tmp_path / "file.pt"
    file.write_bytes(content((reproduction / "Sun_model.pt").read_bytes()))
    with pytest.raises(UnreadableCheckpoint, match=message):
        engram_import(str(file))
    assert_nothing_written()


def test_a_missing_file_and_a_folder_are_errors(tmp_path, engram_import):
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        engram_import(str(tmp_path / "typo.pt"))
    with pytest.raises(UnreadableCheckpoint, match="is not a file"):
        engram_import(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"conv1.weight": torch.zeros(2)}, "it has no 'vit.embeddings.cls_tokens.0', but 'conv1."),
        ({}, "but nothing"),
        ([1, 2], "it contains a list"),
        ({3: torch.zeros(2)}, "a tensor has the name 3"),
    ],
)
def test_other_content_is_not_of_the_reproduction(engram_import, content, message):
    with pytest.raises(
        ForeignCheckpoint, match=f"not a checkpoint of the public reproduction.*{message}"
    ):
        engram_import(content)
    assert_nothing_written()


HEAD = "classifiers.1.weight"
MEMORY = ATTENTION.format(1) + "memory_tokens.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({HEAD: torch.zeros(11, 47)}, r"classifiers.1.weight' is \(11, 47\), but \(any, 48\)"),
        ({HEAD: torch.full((11, 48), torch.nan)}, "classifiers.1.weight' has values .* not finite"),
        ({HEAD: torch.zeros(11, 48).int()}, "stored as torch.int32"),
        ({HEAD: torch.zeros(11, 48).to_sparse()}, "sparse"),
        ({HEAD: torch.zeros(11, 48, device="meta")}, "meta"),
        ({HEAD: torch.zeros(1, 1).expand(10**8, 48)}, "fewer are stored"),
        ({HEAD: "weights"}, "is a str"),
        ({"classifiers.1.bias": torch.zeros(12)}, r"classifiers.1.bias' is \(12,\)"),
        ({MEMORY: torch.zeros(1, 3, 48)}, "layer.1.*memory_tokens.0' is .*1, 3, 48"),
        ({"vit.embeddings.cls_tokens.3": torch.zeros(1, 1, 48)}, "memory_tokens.1' is missing"),
        ({"vit.embeddings.position_embeddings": torch.zeros(17, 48)}, "position_embeddings"),
    ],
)
def test_tensor_that_contradicts_the_rest_is_named(state, engram_import, changes, message):
    with pytest.raises(InconsistentCheckpoint, match=message):
        engram_import(state("Sun") | changes)
    assert_nothing_written()


@pytest.mark.parametrize(
    ("removed", "message"),
    [
        (HEAD, "'classifiers.1.weight' is missing"),
        (MEMORY, "memory_tokens.0' is missing"),
        (MASKS[1], "layer.1.attention.attention.attention_mask' is missing"),
        ("vit.embeddings.cls_tokens.1", "and no task"),
    ],
)
def test_missing_tensor_is_named(state, engram_import, removed, message):
    changed = state("Sun")
    del changed[removed]
    with pytest.raises(InconsistentCheckpoint, match=message):
        engram_import(changed)


def test_checkpoint_without_masks_is_refused(state, engram_import):
    changed = {key: tensor for key, tensor in state("Sun").items() if key not in MASKS}
    with pytest.raises(InconsistentCheckpoint, match="no attention mask"):
        engram_import(changed)
