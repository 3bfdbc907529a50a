"""`engram import`: checkpoints of the seed reproduction become bundles that answer the same."""

import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import ViTForImageClassification

from server.model import MultiTaskViT, load_backbone
from task_store import (
    GOLDEN_TOLERANCE,
    InvalidName,
    MissingParent,
    TaskBundle,
    UnreadableBundle,
    check_compatible,
    open_store,
)
from tests import families
from tests.reference.dense import ReferenceTask, dense_forward
from tests.training.checkpoints import ATTENTION, BASE_TOKENS, LAYERS, MASKS, combined, mask
from training.errors import (
    BackboneDiffers,
    ImportFailed,
    NotASeedCheckpoint,
    OddCheckpoint,
    UnreadableCheckpoint,
    WrongOutput,
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "import.md"
CHAIN = [[], [0], [0, 1]]
APART = [[], [], []]


def model_of(backbone, bundles):
    model = MultiTaskViT(backbone)
    for name, bundle in bundles.items():
        model.add(name, bundle)
    return model


def assert_nothing_written():
    assert list(Path.cwd().iterdir()) == []


# --- the oracle -----------------------------------------------------------------------------------


def test_every_logit_of_the_seed_is_reproduced(seed, backbone, task_names, engram_import):
    expected = load_file(seed / "expected.safetensors")
    pixels = expected.pop("pixel_values")
    alone = {}
    for task in task_names:
        file = f"{task.lower()}.safetensors"
        engram_import(str(seed / f"{task}_model.pt"), out=file, name=task.lower())
        alone[task] = TaskBundle.load(file)
    names = [argument for task in task_names for argument in ("--name", task.lower())]
    engram_import(str(seed / "extended_model.pt"), *names, out="extended")
    extended = {
        task: TaskBundle.load(f"extended/{task.lower()}.safetensors") for task in task_names
    }

    found = {}
    for task, bundle in alone.items():
        logits = model_of(backbone, {task: bundle})(pixels)
        found[f"alone.{task}.logits"], found["base.logits"] = logits[task], logits["base"]
    for kind, bundles in (("concatenated", alone), ("extended", extended)):
        logits = model_of(backbone, bundles)(pixels)
        found |= {f"{kind}.{task}.logits": values for task, values in logits.items()}

    assert found.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(found[key], values, atol=1e-4, rtol=0, msg=key)


def test_concatenated_checkpoint_answers_as_its_tasks_alone(
    seed, backbone, task_names, state, engram_import
):
    expected = load_file(seed / "expected.safetensors")
    printed = engram_import(combined([state(task) for task in task_names], APART))
    assert printed.count("concatenated") == 3
    bundles = {
        task: TaskBundle.load(f"bundles/task-{number}.safetensors")
        for number, task in enumerate(task_names, start=1)
    }
    assert all(bundle.extends == () for bundle in bundles.values())
    logits = model_of(backbone, bundles)(expected["pixel_values"])
    for task in task_names:
        wanted = expected[f"concatenated.{task}.logits"]
        torch.testing.assert_close(logits[task], wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("seen", "parents"),
    [
        (CHAIN, {1: [], 2: [1], 3: [2]}),
        ([[], [], [0, 1]], {1: [], 2: [], 3: [1, 2]}),
        ([[], [0], [0]], {1: [], 2: [1], 3: [1]}),
        ([[], [0], []], {1: [], 2: [1], 3: []}),
        ([[1, 2], [2], []], {1: [2], 2: [3], 3: []}),  # stored before its parents
        ([[], [0], [0], [0, 1, 2]], {1: [], 2: [1], 3: [1], 4: [2, 3]}),
    ],
    ids=["chain", "two-parents", "two-children", "mixture", "child-first", "diamond"],
)
def test_only_direct_parents_are_linked_and_logits_are_the_reference(
    seed, backbone, task_names, state, engram_import, seen, parents
):
    states = [state(task) for task in [*task_names, task_names[0]][: len(seen)]]
    engram_import(combined(states, seen))
    bundles = {number: TaskBundle.load(f"bundles/task-{number}.safetensors") for number in parents}
    for number, bundle in bundles.items():
        assert bundle.extends == tuple(bundles[parent].digest for parent in parents[number])

    tasks = {
        str(number): ReferenceTask(
            head_weight=torch.tensor(bundle.head_weight),
            head_bias=torch.tensor(bundle.head_bias),
            class_token=torch.tensor(bundle.class_token),
            memory=torch.tensor(bundle.memory),
            placement="post_norm",
            parents=tuple(map(str, parents[number])),
        )
        for number, bundle in bundles.items()
    }
    pixels = load_file(seed / "expected.safetensors")["pixel_values"]
    with torch.no_grad():
        original = ViTForImageClassification.from_pretrained(seed / "backbone").eval()
        wanted = dense_forward(original, pixels, tasks)
    order = sorted(parents, key=lambda number: len(seen[number - 1]))
    logits = model_of(backbone, {str(number): bundles[number] for number in order})(pixels)
    for name in tasks:
        torch.testing.assert_close(logits[name], wanted[name], atol=1e-4, rtol=0)


# --- what a bundle says ---------------------------------------------------------------------------


def test_bundle_names_its_backbone_its_origin_and_its_examples(seed, backbone, engram_import):
    engram_import(str(seed / "extended_model.pt"), name="vision/t")
    bundles = [TaskBundle.load(f"bundles/vision-t-{number}.safetensors") for number in (1, 2, 3)]
    model = model_of(backbone, {f"t{number}": one for number, one in enumerate(bundles)})
    for number, bundle in enumerate(bundles):
        check_compatible(
            bundle,
            fingerprint=backbone.fingerprint,
            layers=backbone.layers,
            width=backbone.width,
            preprocessing=backbone.preprocessing,
            image_size=backbone.image_size,
        )
        assert bundle.placement == "post_norm"
        assert bundle.manifest.backbone.name == "backbone"
        assert bundle.manifest.training == {
            "imported_from": "extended_model.pt",
            "sha256": bundle.manifest.training["sha256"],
            "kind": "extended",
            "position": number + 1,
        }
        assert bundle.golden_pixels.shape == (2, 32, 32, 3)
        replayed = model(torch.tensor(bundle.golden_pixels))[f"t{number}"].numpy()
        assert abs(replayed - bundle.golden_logits).max() < GOLDEN_TOLERANCE / 10


def test_table_and_next_step(seed, engram_import):
    printed = engram_import(str(seed / "extended_model.pt"), name="t")
    rows = [line.split() for line in printed.splitlines() if "kB" in line]
    assert [row[:6] for row in rows] == [
        ["t-1", "extended", "100", "1", "–", "bundles/t-1.safetensors"],
        ["t-2", "extended", "36", "4", "t-1", "bundles/t-2.safetensors"],
        ["t-3", "extended", "11", "2", "t-2", "bundles/t-3.safetensors"],
    ]
    for row in rows:
        assert TaskBundle.load(row[5]).digest.startswith(f"sha256:{row[6]}")
    assert printed.rstrip().endswith("engram push bundles/t-3.safetensors")


def test_same_import_twice_gives_the_same_files(seed, engram_import):
    engram_import(str(seed / "extended_model.pt"))
    before = {file: file.stat().st_mtime_ns for file in Path("bundles").iterdir()}
    engram_import(str(seed / "extended_model.pt"))
    assert {file: file.stat().st_mtime_ns for file in Path("bundles").iterdir()} == before


def test_store_takes_parents_before_children(seed, engram_import):
    engram_import(str(seed / "extended_model.pt"))
    bundles = [TaskBundle.load(f"bundles/task-{number}.safetensors") for number in (1, 2, 3)]
    store = open_store("memory://")
    with pytest.raises(MissingParent):
        store.publish("c", bundles[2])
    for name, bundle in zip("abc", bundles, strict=True):
        store.publish(name, bundle)
    assert store.read_bundle(store.catalog().resolve("c").digest) == bundles[2]


# --- wrappings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {f"module.{key}": tensor for key, tensor in state.items()},
        lambda state: {f"_orig_mod.module.{key}": tensor for key, tensor in state.items()},
        lambda state: {"epoch": 3, "state_dict": state},
        lambda state: {"model_state_dict": state, "optimizer": {"lr": 0.1}},
        lambda state: {key: torch.nn.Parameter(tensor) for key, tensor in state.items()},
        lambda state: state | {"vit.pooler.dense.weight": torch.zeros(48, 48)},
    ],
    ids=["data-parallel", "compiled", "state_dict", "model_state_dict", "parameters", "pooler"],
)
def test_wrapped_checkpoint_is_the_same_task(state, engram_import, wrap):
    engram_import(state("Sun"), out="plain.safetensors")
    engram_import(wrap(state("Sun")), out="wrapped.safetensors")
    plain, wrapped = TaskBundle.load("plain.safetensors"), TaskBundle.load("wrapped.safetensors")
    assert (plain.memory == wrapped.memory).all()
    assert (plain.golden_logits == wrapped.golden_logits).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_brought_to_float32(state, engram_import, dtype):
    stored = {key: tensor.to(dtype) for key, tensor in state("Sun").items()}
    engram_import(stored, out="t.safetensors")
    bundle = TaskBundle.load("t.safetensors")
    wanted = stored["classifiers.1.weight"].float().numpy()
    assert (bundle.head_weight == wanted).all()


def test_task_without_memory_becomes_a_class_token_and_a_head(state, backbone, engram_import):
    changed = state("Sun")
    for layer in range(LAYERS):
        changed[ATTENTION.format(layer) + "memory_tokens.0"] = torch.zeros(1, 0, 48)
        changed[MASKS[layer]] = mask([[]], [0])
    engram_import(changed, out="t.safetensors")
    assert TaskBundle.load("t.safetensors").memory_tokens == 0


def test_backbone_without_query_key_and_value_biases(tmp_path, state, engram_import):
    model = families.build("vit", 0, qkv_bias=False)
    folder = families.save(model, tmp_path / "no-bias")
    changed = seed_state(load_file(folder / "model.safetensors"))
    engram_import(changed, backbone=folder, out="t.safetensors")
    assert TaskBundle.load("t.safetensors").classes == 5


def seed_state(tensors):
    """A single task with zero memory, on a Hugging Face model as saved."""
    prefix = "" if any(key.startswith("vit.") for key in tensors) else "vit."
    state = {prefix + key: tensor for key, tensor in tensors.items()}
    token = state.pop("vit.embeddings.cls_token")
    base, width = state["vit.embeddings.position_embeddings"].shape[1:]
    for key in [key for key in state if key.startswith("classifier.")]:
        state["classifiers.0." + key.removeprefix("classifier.")] = state.pop(key)
    for layer in {int(found[1]) for key in state if (found := re.search(r"layer\.(\d+)\.", key))}:
        state[ATTENTION.format(layer) + "memory_tokens.0"] = torch.zeros(1, 2, width)
        state[ATTENTION.format(layer) + "attention_mask"] = mask([[]], [2], base)
    return state | {
        "vit.embeddings.cls_tokens.0": token,
        "vit.embeddings.cls_tokens.1": token,
        "classifiers.1.weight": torch.ones(5, width),
        "classifiers.1.bias": torch.zeros(5),
    }


# --- the backbone ---------------------------------------------------------------------------------


def test_changed_backbone_is_refused_with_the_tensor_and_the_difference(state, engram_import):
    changed = state("Sun")
    key = "vit.encoder.layer.1.output.dense.weight"
    changed[key] = changed[key].clone()
    changed[key][3, 4] += 0.25
    with pytest.raises(BackboneDiffers, match=re.escape(f"'{key}' differs by up to 0.25")) as error:
        engram_import(changed)
    assert "1 of 54 tensors differ" in str(error.value)
    assert_nothing_written()


def test_rounding_of_half_precision_is_no_difference_but_more_is(state, engram_import):
    changed = {key: tensor.half() for key, tensor in state("Sun").items()}
    changed["vit.layernorm.bias"] = changed["vit.layernorm.bias"] + 0.01
    with pytest.raises(BackboneDiffers, match=r"vit\.layernorm\.bias' differs by up to 0.01"):
        engram_import(changed)


@pytest.mark.parametrize(
    ("family", "overrides", "message"),
    [
        ("vit", {"num_hidden_layers": 2}, "has 3 layers, and the backbone .* has 2"),
        ("deit", {"num_hidden_layers": 3}, "another family"),
        ("vit", {}, "is .* instead of"),
    ],
)
def test_another_model_is_refused(seed, folder_of, engram_import, family, overrides, message):
    with pytest.raises(BackboneDiffers, match=message):
        engram_import(str(seed / "Sun_model.pt"), backbone=folder_of(family, **overrides))
    assert_nothing_written()


@pytest.mark.parametrize("missing", ["vit.layernorm.bias", "vit.embeddings.cls_tokens.0"])
def test_missing_backbone_tensor_is_named(state, engram_import, missing):
    changed = state("Sun")
    del changed[missing]
    with pytest.raises(ImportFailed, match=re.escape(missing)):
        engram_import(changed)


@pytest.mark.parametrize("key", ["vit.encoder.layer.7.gate", "classifiers.9.weight"])
def test_tensor_that_nothing_reads_is_refused(state, engram_import, key):
    with pytest.raises(BackboneDiffers, match=re.escape(f"the checkpoint has '{key}'")):
        engram_import(state("Sun") | {key: torch.zeros(2)})


def test_folder_given_as_a_dot_has_its_own_name(seed, tmp_path, monkeypatch, engram_import):
    monkeypatch.chdir(seed / "backbone")
    out = tmp_path / "t.safetensors"
    engram_import(str(seed / "Sun_model.pt"), backbone=".", out=str(out))
    assert TaskBundle.load(out).manifest.backbone.name == "backbone"


def test_backbone_at_another_image_size_is_refused(seed, tmp_path, engram_import):
    folder = tmp_path / "resized"
    folder.mkdir()
    for file in (seed / "backbone").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 64, "width": 64}}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    assert load_backbone(folder).image_size == (64, 64)
    with pytest.raises(BackboneDiffers, match=r"position_embeddings' is \(1, 17, 48\) instead of"):
        engram_import(str(seed / "Sun_model.pt"), backbone=folder)


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
        (edit_one_layer, "layers 0 and 2 disagree on whether C_1 attends to C_2"),
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
def test_odd_mask_is_refused_naming_what_is_odd(state, engram_import, change, message):
    changed = state("extended")
    change(changed)
    with pytest.raises(OddCheckpoint, match=message):
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
        (lambda good: good[: len(good) // 2], "cut short or damaged"),
        (lambda good: good[:-1], "cut short or damaged"),
        (lambda good: b"", "is empty"),
        (lambda good: b"class names\n", "no PyTorch checkpoint"),
        (lambda good: pickle.dumps({"a": 1}), "no PyTorch checkpoint"),
        (lambda good: pickle.dumps(Hostile()), "no PyTorch checkpoint"),
    ],
    ids=["half", "one-byte-less", "empty", "text", "pickle", "hostile-pickle"],
)
def test_damaged_or_foreign_file_is_refused(seed, tmp_path, engram_import, content, message):
    file = tmp_path / "file.pt"
    file.write_bytes(content((seed / "Sun_model.pt").read_bytes()))
    with pytest.raises(UnreadableCheckpoint, match=message):
        engram_import(str(file))
    assert_nothing_written()


def test_missing_file_and_folder_are_said(tmp_path, engram_import):
    with pytest.raises(UnreadableCheckpoint, match="there is no such file"):
        engram_import(str(tmp_path / "typo.pt"))
    with pytest.raises(UnreadableCheckpoint, match="is not a file"):
        engram_import(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"conv1.weight": torch.zeros(2)}, "no 'vit.embeddings.cls_tokens.0' in it, but 'conv1."),
        ({}, "but nothing"),
        ([1, 2], "it holds a list"),
        ({3: torch.zeros(2)}, "names a tensor 3"),
    ],
)
def test_other_content_is_not_of_the_seed(engram_import, content, message):
    with pytest.raises(
        NotASeedCheckpoint, match=f"not a checkpoint of the seed reproduction.*{message}"
    ):
        engram_import(content)
    assert_nothing_written()


HEAD = "classifiers.1.weight"
MEMORY = ATTENTION.format(1) + "memory_tokens.0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({HEAD: torch.zeros(11, 47)}, r"classifiers.1.weight' is \(11, 47\); .*\(any, 48\)"),
        ({HEAD: torch.full((11, 48), torch.nan)}, "classifiers.1.weight' has values .* not finite"),
        ({HEAD: torch.zeros(11, 48).int()}, "stored as torch.int32"),
        ({HEAD: torch.zeros(11, 48).to_sparse()}, "sparse"),
        ({HEAD: torch.zeros(11, 48, device="meta")}, "meta"),
        ({HEAD: torch.zeros(1, 1).expand(10**8, 48)}, "more than are stored"),
        ({HEAD: "weights"}, "is a str"),
        ({"classifiers.1.bias": torch.zeros(12)}, r"classifiers.1.bias' is \(12,\)"),
        ({MEMORY: torch.zeros(1, 3, 48)}, "layer.1.*memory_tokens.0' is .*1, 3, 48"),
        ({"vit.embeddings.cls_tokens.3": torch.zeros(1, 1, 48)}, "memory_tokens.1' is missing"),
        ({"vit.embeddings.position_embeddings": torch.zeros(17, 48)}, "position_embeddings"),
    ],
)
def test_tensor_that_contradicts_the_rest_is_named(state, engram_import, changes, message):
    with pytest.raises(OddCheckpoint, match=message):
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
    with pytest.raises(OddCheckpoint, match=message):
        engram_import(changed)


def test_checkpoint_without_masks_is_refused(state, engram_import):
    changed = {key: tensor for key, tensor in state("Sun").items() if key not in MASKS}
    with pytest.raises(OddCheckpoint, match="no attention mask"):
        engram_import(changed)


# --- names and files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "b"], "has 3 tasks but 2 names"),
        (["a", "b", "c", "d"], "has 3 tasks but 4 names"),
        (["a", "b", "a"], "'a' was given to more than one"),
    ],
)
def test_names_that_do_not_fit_are_refused(seed, engram_import, names, message):
    given = [argument for name in names for argument in ("--name", name)]
    with pytest.raises(WrongOutput, match=message):
        engram_import(str(seed / "extended_model.pt"), *given)
    assert_nothing_written()


@pytest.mark.parametrize("name", ["base", "CIFAR", "../x", "a/b/c"])
def test_name_nobody_could_publish_is_refused(seed, engram_import, name):
    with pytest.raises(InvalidName):
        engram_import(str(seed / "Sun_model.pt"), name=name)
    assert_nothing_written()


@pytest.mark.parametrize(
    ("out", "files"),
    [
        ("new/folder", ["new/folder/t-1.safetensors", "new/folder/t-3.safetensors"]),
        ("seed-{name}.safetensors", ["seed-t-1.safetensors", "seed-t-3.safetensors"]),
        ("{name}/task.safetensors", ["t-1/task.safetensors", "t-3/task.safetensors"]),
    ],
)
def test_several_tasks_go_to_a_folder_or_a_pattern(seed, engram_import, out, files):
    engram_import(str(seed / "extended_model.pt"), out=out, name="t")
    assert all(Path(file).is_file() for file in files)


def test_one_file_for_several_tasks_is_refused(seed, engram_import):
    with pytest.raises(WrongOutput, match=r"has 3 tasks and 'a\.safetensors' is one file"):
        engram_import(str(seed / "extended_model.pt"), out="a.safetensors")
    assert_nothing_written()


def test_two_tasks_of_one_file_name_are_refused(state, engram_import):
    both = combined([state("Sun"), state("Places")], [[], []])
    with pytest.raises(WrongOutput, match="two tasks would be written to"):
        engram_import(both, "--name", "a/b", "--name", "a-b")


def test_existing_file_is_never_replaced(seed, engram_import):
    Path("bundles").mkdir()
    Path("bundles/task-3.safetensors").write_text("mine")
    with pytest.raises(WrongOutput, match=r"task-3\.safetensors' exists and is something else"):
        engram_import(str(seed / "extended_model.pt"))
    assert [file.name for file in Path("bundles").iterdir()] == ["task-3.safetensors"]
    assert Path("bundles/task-3.safetensors").read_text() == "mine"


def test_folder_that_cannot_be_made_is_said(seed, engram_import):
    Path("file").write_text("not a folder")
    with pytest.raises(WrongOutput, match="file"):
        engram_import(str(seed / "Sun_model.pt"), out="file/inside")
    assert [file.name for file in Path.cwd().iterdir()] == ["file"]


def test_failure_while_writing_takes_back_what_was_written(seed, engram_import, monkeypatch):
    save, saved = TaskBundle.save, []

    def full_after_two(bundle, path):
        if len(saved) == 2:
            raise UnreadableBundle("No space left on device")
        saved.append(save(bundle, path))

    monkeypatch.setattr(TaskBundle, "save", full_after_two)
    with pytest.raises(UnreadableBundle):
        engram_import(str(seed / "extended_model.pt"), out="new/folder")
    assert len(saved) == 2
    assert_nothing_written()


# --- the document ---------------------------------------------------------------------------------


def test_document_shows_the_real_command_and_its_real_output(seed, engram_import, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("CIFAR100_model.pt", "extended_model.pt", "backbone"):
        Path(name).symlink_to(seed / name)
    Path("cifar100.txt").write_text("\n".join(f"label {index}" for index in range(100)))
    sessions = re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert len(sessions) == 2
    for session in sessions:
        command, _, shown = session.replace("\\\n", "").partition("\n")
        program, verb, file, *options = command.split()[1:]
        assert (program, verb) == ("engram", "import")
        given = dict(zip(options[::2], options[1::2], strict=True))
        rest = [part for key in ("--labels",) if key in given for part in (key, given[key])]
        printed = engram_import(
            file, *rest, backbone=given["--backbone"], out=given["--out"], name=given["--name"]
        )
        assert without_digests(printed) == without_digests(shown)


def test_python_in_the_document_runs(seed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(seed)
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    exec(program, {})
    assert "sun ('places',) sha256:" in capsys.readouterr().out


def without_digests(text):
    """Digests cover logits, whose last bits differ between processors."""
    lines = re.sub(r"\b[0-9a-f]{12}\b", "digest", text).strip().splitlines()
    return [line.rstrip() for line in lines]
