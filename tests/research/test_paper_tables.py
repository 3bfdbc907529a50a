"""The program behind the paper's tables, whole, on a tiny backbone and generated pictures."""

import json
import tarfile

import pytest

from research import paper_tables
from research.paper_images import list_images, select
from tests.training.pictures import COLOURS, class_folders

SIZES = [
    *["--a-train", "4", "--a-test", "8", "--a-epochs", "2", "--a-batch", "8"],
    *["--b-classes", "3", "--b-train", "2", "--b-test", "6", "--b-epochs", "1", "--b-seeds", "2"],
    *["--rates", "0.01,0.1", "--memory", "1,2", "--full-memory", "2"],
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    root = tmp_path_factory.mktemp("archive")
    class_folders(root / "colours" / "train", each=6)
    class_folders(root / "colours" / "test", each=3, seed=1)
    with tarfile.open(root / "cifar100.tar", "w") as tar:
        tar.add(root / "colours", "colours")
    (root / "colours").rename(root / "flowers102")  # a data set may be a folder, too
    return root / "cifar100.tar"


@pytest.fixture
def run(archive, folder_of, tmp_path, capsys):
    """`run(*more)`: the program with tiny sizes; what it prints."""
    paths = {
        "backbone": folder_of("vit"),
        "data": archive.parent,
        "results": tmp_path / "results" / "tables.json",
        "page": tmp_path / "page.md",
    }
    named = [text for name, path in paths.items() for text in (f"--{name}", str(path))]

    def program(*more):
        paper_tables.main([*named, *SIZES, *more])
        return capsys.readouterr().out

    return program


def results_in(folder):
    return json.loads((folder / "results" / "tables.json").read_text())


def without_times(results):
    for stage in results["stages"].values():
        stage["seconds"] = 0
    return results


def test_the_whole_program_measures_every_regime_and_writes_the_page(run, tmp_path):
    printed = run()
    results = results_in(tmp_path)
    runs = {
        (stage["table"], stage["data"], run["regime"], run["memory"], run["rate"], run["seed"])
        for stage in results["stages"].values()
        for run in stage["runs"]
    }
    for data in ("cifar100", "flowers102"):
        of_a = {run[2:4] for run in runs if run[:2] == ("a", data)}
        of_b = {run[2:4] for run in runs if run[:2] == ("b", data)}
        assert of_a == {("head", 0), ("class", 0), ("memory", 1), ("memory", 2)}
        assert of_b == of_a | {("full attention", 2), ("full fine-tuning", 0)}
        # Two rates; two starts in both tables where memory is drawn, and else one.
        assert sum(run[:2] == ("a", data) for run in runs) == 2 * (1 + 1 + 2 + 2)
        assert sum(run[:2] == ("b", data) for run in runs) == 2 * (1 + 1 + 2 + 2 + 2 + 1)
    counts = results["data"]["cifar100"]["tables"]
    assert counts["a"] == {"classes": 4, "train": 16, "val": 4, "test": 8}
    assert counts["b"] == {"classes": 3, "train": 6, "val": 3, "test": 6}
    for stage in results["stages"].values():
        assert {len(run["test"]) for run in stage["runs"]} == {counts[stage["table"]]["test"]}
    page = (tmp_path / "page.md").read_text()
    for title in (
        "full fine-tuning",
        "head + class token",
        "1 memory token",
        "2 memory tokens, full attention",
    ):
        assert f"| {title} |" in page
    assert str(tmp_path) not in page
    assert "Table B, CIFAR-100: 3 classes, 6 train, 3 val, 6 test" in printed
    assert f"[1/{len(results['stages'])}] Table A, CIFAR-100, servable" in printed


def test_every_regime_is_trained_with_the_papers_optimiser():
    settings = paper_tables.settings_of(paper_tables.parse([]))
    variants = paper_tables.servable(settings, [0])
    assert {variant.regime for variant in variants} == {"head", "class", "memory"}
    assert {variant.optimiser for variant in variants} == {"SGD"}


def test_an_interrupted_run_trains_only_what_is_missing_and_ends_the_same(
    run, tmp_path, monkeypatch
):
    trained = []
    train_alone = paper_tables.train_alone

    def interrupted(*arguments):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(arguments[-1].name)
        return train_alone(*arguments)

    monkeypatch.setattr(paper_tables, "train_alone", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert not (tmp_path / "page.md").exists()
    assert set(trained) < set(results_in(tmp_path)["stages"])

    monkeypatch.setattr(paper_tables, "train_alone", train_alone)
    printed = run()
    for name in trained:
        assert f"{name}: done before" in printed
    resumed = without_times(results_in(tmp_path))
    (tmp_path / "results" / "tables.json").unlink()
    run()
    assert without_times(results_in(tmp_path)) == resumed


def test_results_of_other_settings_are_neither_mixed_in_nor_overwritten(run, tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    before = json.dumps({"settings": {}, "stages": {"a": 1}})
    (folder / "tables.json").write_text(before)
    with pytest.raises(SystemExit, match="other settings; give the same options"):
        run()
    assert (folder / "tables.json").read_text() == before


def test_full_attention_needs_a_masked_row_to_be_compared_with(run):
    with pytest.raises(SystemExit, match="--full-memory must be among --memory"):
        run("--full-memory", "7")


# --- images ---------------------------------------------------------------------------------------


def test_a_smaller_table_is_part_of_a_larger_one_and_no_image_is_in_two_splits(archive):
    listing = list_images(archive)
    large = select(listing, 100, 4, 100, seed=0)
    small = select(listing, 2, 2, 4, seed=0)
    assert large.labels == tuple(sorted(COLOURS))
    assert set(small.labels) < set(large.labels)
    assert small.counts() == {"classes": 2, "train": 4, "val": 2, "test": 4}
    for split in ("train", "val", "test"):
        assert set(small.names[split]) <= set(large.names[split])
    every = [name for names in large.names.values() for name in names]
    assert len(every) == len(set(every)) == 4 * (4 + 1 + 3)
    assert all("/test/" in name for name in large.names["test"])
    targets = small.targets("train").tolist()
    folders = [name.split("/")[2] for name in small.names["train"]]
    assert [small.labels[place] for place in targets] == folders


def test_another_seed_draws_other_images(archive):
    listing = list_images(archive)
    assert select(listing, 4, 2, 4, seed=0).names != select(listing, 4, 2, 4, seed=1).names


# --- options --------------------------------------------------------------------------------------


def test_the_command_on_the_page_repeats_the_figures_and_names_no_folder():
    default = paper_tables.parse(["--results", "/elsewhere/results.json"])
    assert paper_tables.command_of(default) == "python -m research.paper_tables"
    changed = paper_tables.parse(["--b-epochs", "7", "--rates", "0.02"])
    command = paper_tables.command_of(changed)
    assert command == "python -m research.paper_tables --b-epochs 7 --rates 0.02"


def test_the_default_run_is_planned_to_take_less_than_half_an_hour():
    settings = paper_tables.settings_of(paper_tables.parse([]))
    counts = {  # of the archives that it is meant for
        ("a", "cifar100"): {"train": 3000, "val": 1000, "test": 1000},
        ("b", "cifar100"): {"train": 200, "val": 200, "test": 300},
        ("a", "flowers102"): {"train": 1836, "val": 204, "test": 622},
        ("b", "flowers102"): {"train": 200, "val": 40, "test": 119},
    }
    stages = paper_tables.stages_of(settings, ["cifar100", "flowers102"])
    planned = sum(
        paper_tables.planned_seconds(stage, settings, counts[stage.table, stage.data])
        for stage in stages
    )
    assert 20 * 60 < planned < 30 * 60
