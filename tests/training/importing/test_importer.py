"""`engram import`: checkpoints of the public reproduction become bundles that answer the same."""

import re
from pathlib import Path

import pytest
import torch
from engram_bundle import GOLDEN_TOLERANCE, TaskBundle, check_compatible
from engram_server.model import MultiTaskViT
from engram_store import MissingParent, open_store
from safetensors.torch import load_file
from transformers import ViTForImageClassification

from tests import families
from tests.conftest import REPOSITORY
from tests.reference.dense import ReferenceTask, dense_forward
from tests.training.importing.checkpoints import (
    ATTENTION,
    LAYERS,
    MASKS,
    combined,
    mask,
)

DOCUMENT = REPOSITORY / "docs" / "how-to" / "import.md"
CHAIN = [[], [0], [0, 1]]
APART = [[], [], []]


def model_of(backbone, bundles):
    model = MultiTaskViT(backbone)
    for name, bundle in bundles.items():
        model.add(name, bundle)
    return model


# --- the oracle -----------------------------------------------------------------------------------


def test_every_logit_of_the_reproduction_is_repeated(
    reproduction, backbone, task_names, engram_import
):
    expected = load_file(reproduction / "expected.safetensors")
    pixels = expected.pop("pixel_values")
    alone = {}
    for task in task_names:
        file = f"{task.lower()}.safetensors"
        engram_import(str(reproduction / f"{task}_model.pt"), out=file, name=task.lower())
        alone[task] = TaskBundle.load(file)
    names = [argument for task in task_names for argument in ("--name", task.lower())]
    engram_import(str(reproduction / "extended_model.pt"), *names, out="extended")
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
    reproduction, backbone, task_names, state, engram_import
):
    expected = load_file(reproduction / "expected.safetensors")
    printed = engram_import(combined([state(task) for task in task_names], APART))
    assert printed.count("concatenated") == 3
    bundles = {
        task: TaskBundle.load(f"bundles/task-{number}.safetensors")
        for number, task in enumerate(task_names, start=1)
    }
    assert all(bundle.extends == () for bundle in bundles.values())
    logits = model_of(backbone, bundles)(expected["pixel_values"])
    for task in task_names:
        logits_expected = expected[f"concatenated.{task}.logits"]
        torch.testing.assert_close(logits[task], logits_expected, atol=1e-4, rtol=0)


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
    reproduction, backbone, task_names, state, engram_import, seen, parents
):
    states = [state(task) for task in [*task_names, task_names[0]][: len(seen)]]
    engram_import(combined(states, seen))
    bundles = {number: TaskBundle.load(f"bundles/task-{number}.safetensors") for number in parents}
    for number, bundle in bundles.items():
        assert bundle.extends == tuple(bundles[parent].digest for parent in parents[number])

    tasks = {
        str(number): ReferenceTask(
            head_weight=torch.tensor(bundle.tensors["head.weight"]),
            head_bias=torch.tensor(bundle.tensors["head.bias"]),
            class_token=torch.tensor(bundle.tensors["class_token"]),
            memory=torch.tensor(bundle.tensors["memory"]),
            placement="post_norm",
            parents=tuple(map(str, parents[number])),
        )
        for number, bundle in bundles.items()
    }
    pixels = load_file(reproduction / "expected.safetensors")["pixel_values"]
    with torch.no_grad():
        original = ViTForImageClassification.from_pretrained(reproduction / "backbone").eval()
        reference = dense_forward(original, pixels, tasks)
    order = sorted(parents, key=lambda number: len(seen[number - 1]))
    logits = model_of(backbone, {str(number): bundles[number] for number in order})(pixels)
    for name in tasks:
        torch.testing.assert_close(logits[name], reference[name], atol=1e-4, rtol=0)


# --- what a bundle says ---------------------------------------------------------------------------


def test_bundle_names_its_backbone_its_origin_and_its_examples(
    reproduction, backbone, engram_import
):
    engram_import(str(reproduction / "extended_model.pt"), name="vision/t")
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
        assert bundle.manifest.placement == "post_norm"
        assert bundle.manifest.backbone.name == "backbone"
        assert bundle.manifest.training == {
            "imported_from": "extended_model.pt",
            "sha256": bundle.manifest.training["sha256"],
            "kind": "extended",
            "position": number + 1,
        }
        assert bundle.tensors["golden.pixels"].shape == (2, 32, 32, 3)
        replayed = model(torch.tensor(bundle.tensors["golden.pixels"]))[f"t{number}"].numpy()
        assert abs(replayed - bundle.tensors["golden.logits"]).max() < GOLDEN_TOLERANCE / 10


def test_table_and_next_step(reproduction, engram_import):
    printed = engram_import(str(reproduction / "extended_model.pt"), name="t")
    rows = [line.split() for line in printed.splitlines() if "kB" in line]
    assert [row[:6] for row in rows] == [
        ["t-1", "extended", "100", "1", "–", "bundles/t-1.safetensors"],
        ["t-2", "extended", "36", "4", "t-1", "bundles/t-2.safetensors"],
        ["t-3", "extended", "11", "2", "t-2", "bundles/t-3.safetensors"],
    ]
    for row in rows:
        assert TaskBundle.load(row[5]).digest.startswith(f"sha256:{row[6]}")
    assert printed.rstrip().endswith("engram push bundles/t-3.safetensors")


def test_same_import_twice_gives_the_same_files(reproduction, engram_import):
    engram_import(str(reproduction / "extended_model.pt"))
    before = {file: file.stat().st_mtime_ns for file in Path("bundles").iterdir()}
    engram_import(str(reproduction / "extended_model.pt"))
    assert {file: file.stat().st_mtime_ns for file in Path("bundles").iterdir()} == before


def test_store_takes_parents_before_children(reproduction, engram_import):
    engram_import(str(reproduction / "extended_model.pt"))
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
    assert (plain.tensors["memory"] == wrapped.tensors["memory"]).all()
    assert (plain.tensors["golden.logits"] == wrapped.tensors["golden.logits"]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_brought_to_float32(state, engram_import, dtype):
    stored = {key: tensor.to(dtype) for key, tensor in state("Sun").items()}
    engram_import(stored, out="t.safetensors")
    bundle = TaskBundle.load("t.safetensors")
    stored_weight = stored["classifiers.1.weight"].float().numpy()
    assert (bundle.tensors["head.weight"] == stored_weight).all()


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
    changed = checkpoint_state(load_file(folder / "model.safetensors"))
    engram_import(changed, backbone=folder, out="t.safetensors")
    assert TaskBundle.load("t.safetensors").classes == 5


def checkpoint_state(tensors):
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


# --- the document ---------------------------------------------------------------------------------


def test_document_shows_the_real_command_and_its_real_output(
    reproduction, engram_import, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("CIFAR100_model.pt", "extended_model.pt", "backbone"):
        Path(name).symlink_to(reproduction / name)
    Path("cifar100.txt").write_text("\n".join(f"label {index}" for index in range(100)))
    sessions = re.findall(r"```console\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert len(sessions) == 2
    for session in sessions:
        command, _, shown = session.replace("\\\n", "").partition("\n")
        program, verb, file, *options = command.split()[1:]
        assert (program, verb) == ("engram", "import")
        values = dict(zip(options[::2], options[1::2], strict=True))
        rest = [part for key in ("--labels",) if key in values for part in (key, values[key])]
        printed = engram_import(
            file, *rest, backbone=values["--backbone"], out=values["--out"], name=values["--name"]
        )
        assert without_digests(printed) == without_digests(shown)


def test_python_in_the_document_runs(reproduction, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(reproduction)
    (program,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.S)
    exec(program, {})
    assert "sun ('places',) sha256:" in capsys.readouterr().out


def without_digests(text):
    """Digests cover logits, whose last bits differ between processors."""
    lines = re.sub(r"\b[0-9a-f]{12}\b", "digest", text).strip().splitlines()
    return [line.rstrip() for line in lines]
