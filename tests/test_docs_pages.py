"""The pages of docs/: nothing leads nowhere, and those on how to do a thing do it."""

import csv
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engram_bundle import TaskBundle
from engram_server.embedded import BACKBONE, publish_demo_tasks
from engram_server.model import MultiTaskViT, load_backbone
from engram_server.model.preprocessing.decoding import DECODERS, SUPPORTED
from engram_server.settings import OTHERS, PREFIX, Settings
from engram_store import open_store
from engram_training import fit
from engram_vit import Client
from transformers import ViTForImageClassification

from benchmarks import mask_figure
from tests.conftest import PHOTOS, REPOSITORY
from tests.documents import (
    ADDRESS,
    DOCS,
    RUN,
    Terminal,
    blocks_of,
    following,
    page_environment,
    read_page,
)
from tests.e2e.server_process import free_port, serving
from tests.reference.dense import ReferenceTask, dense_mask, key_tokens, query_tokens
from tests.test_architecture import project_files
from tests.training.pictures import class_folders, whole_picture

PAGES = sorted(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md"))
KINDS = ("tutorial", "how-to", "reference", "explanation")
EXPLANATION = "explanation/masked-pass.md"
THREATS = "explanation/threat-model.md"
SECURITY_TESTS = "reference/security-tests.md"
# Followed from top to bottom, by tests here and in e2e/test_tutorial.py.
FOLLOWED = [
    "tutorial/quickstart.md",
    "tutorial/first-task.md",
    EXPLANATION,
    *(
        f"how-to/{name}.md"
        for name in ("batch", "migrate", "operate", "publish", "roll-back", "teach")
    ),
]


# --- links ----------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    """Code may look like a link or a heading and is neither."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.M | re.S)


def links_of(page: Path) -> list[str]:
    prose = re.sub(r"`[^`\n]*`", "", without_code(page.read_text(encoding="utf-8")))
    links = re.findall(r"\]\(\s*([^)\s]+)", prose) + re.findall(r"(?:src|href)=\"([^\"]+)\"", prose)
    return [link for link in links if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", without_code(page.read_text(encoding="utf-8")), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def markdown_files() -> list[str]:
    files = (file for file in project_files() if file.suffix == ".md" and file.is_file())
    return sorted(file.relative_to(REPOSITORY).as_posix() for file in files)


@pytest.mark.parametrize("name", markdown_files())
def test_no_link_is_broken(name):
    page = REPOSITORY / name
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(REPOSITORY), link
        assert target.exists(), link
        assert not anchor or anchor in anchors_of(target), link


def test_files_outside_docs_name_only_pages_that_exist():
    wrong = []
    for file in project_files():
        if file.suffix in (".md", ".png", ".jpg", ".safetensors") or not file.is_file():
            continue
        content = file.read_bytes()
        if b"\0" not in content:
            named = re.findall(r"(?<![\w/])docs/[\w/-]+\.md", content.decode("utf-8", "replace"))
            wrong += [(file.name, page) for page in named if not (REPOSITORY / page).exists()]
    assert not wrong


def test_every_page_is_in_the_index():
    index = DOCS / "README.md"
    linked = {(DOCS / link).resolve() for link in links_of(index)}
    assert {name for name in PAGES if (DOCS / name).resolve() not in linked} == {"README.md"}


# --- protections ----------------------------------------------------------------------------------


def protections() -> list[str]:
    """The names of the protections in the threat model."""
    section = read_page(THREATS).partition("## Protections")[2].partition("\n## ")[0]
    return [" ".join(name.split()) for name in re.findall(r"^\*\*(.+?)\*\*", section, re.M | re.S)]


def security_tests() -> dict[str, list[str]]:
    """The tests that the reference page lists for each protection."""
    rows = re.findall(r"^\| (.+?) \| (`tests/.+`) \|$", read_page(SECURITY_TESTS), re.M)
    return {name: re.findall(r"`(tests/[\w/]+\.py::\w+)`", tests) for name, tests in rows}


def test_every_protection_names_tests_that_exist():
    assert len(protections()) > 8
    assert list(security_tests()) == protections()
    for protection, tests in security_tests().items():
        assert tests, protection
        for test in tests:
            file, _, name = test.partition("::")
            source = (REPOSITORY / file).read_text(encoding="utf-8")
            assert re.search(rf"^(async )?def {name}\(", source, re.MULTILINE), test


# --- what pages speak of --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FOLLOWED)
def test_every_code_block_is_run(name):
    # `text` is what a command prints, or a picture made of letters; `mermaid` is a picture.
    assert {block.language for block in blocks_of(read_page(name))} <= {*RUN, "text", "mermaid"}


@pytest.mark.parametrize("name", PAGES)
def test_settings_and_metrics_exist(name):
    page = read_page(name)
    settings = {PREFIX + field.upper() for field in Settings.model_fields} | OTHERS
    assert set(re.findall(r"ENGRAM_[A-Z_]+", page)) <= settings
    metrics = set(re.findall(r"`(engram_\w+)`", read_page("reference/metrics.md")))
    packages = {"engram_bundle", "engram_server", "engram_store", "engram_training", "engram_vit"}
    named = set(re.findall(r"`(engram_\w+)`", page)) - packages
    assert named <= metrics


def test_every_path_in_the_architecture_page_exists():
    folders = "server|task_store|training|clients|tests|benchmarks|research"
    paths = re.findall(rf"`((?:{folders})/[\w./-]*)`", read_page("explanation/architecture.md"))
    assert len(paths) > 40
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []


# --- the figure -----------------------------------------------------------------------------------


def test_the_figure_is_what_its_script_draws():
    committed = (DOCS / "images" / "attention-mask.svg").read_text(encoding="utf-8")
    assert committed == mask_figure.draw()


def test_the_figure_shows_the_mask_of_the_reference():
    memory = torch.zeros(1, mask_figure.MEMORY_TOKENS, 4)
    tasks = {
        name: ReferenceTask(torch.zeros(1, 4), None, torch.zeros(4), memory, parents=parents)
        for name, parents in mask_figure.TASKS.items()
    }
    base = mask_figure.PATCHES + 1
    expected = dense_mask(query_tokens(base, tasks), key_tokens(base, tasks), tasks)
    queries = [token for group in mask_figure.query_groups() for token in group.tokens]
    keys = [token for group in mask_figure.key_groups() for token in group.tokens]
    drawn = [[mask_figure.seen(query, key) != "none" for key in keys] for query in queries]
    assert drawn == expected.tolist()


# --- following them -------------------------------------------------------------------------------


def test_the_explanations_code_runs(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    code = "\n".join(
        block.content for block in blocks_of(read_page(EXPLANATION)) if block.language == "python"
    )
    exec(compile(code, EXPLANATION, "exec"), {})


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("how-to")) as server:
        yield server


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Three quickly trained versions of a task that tells colours apart."""
    folder = tmp_path_factory.mktemp("bundles")
    photos, backbone = class_folders(folder / "photos", each=10), load_backbone(BACKBONE)
    paths = [folder / f"{number}.safetensors" for number in (1, 2, 3)]
    for path in paths:
        fit(
            photos,
            name="birds",
            backbone=backbone,
            out=path,
            regimes=("head",),
            rates=(0.1,),
            epochs=2 + int(path.stem),
            augment="none",
        )
    return paths


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_publishing(server, bundles, tmp_path):
    class_folders(tmp_path / "test-photos", each=4, seed=1)
    (tmp_path / "photos").mkdir()
    whole_picture("red", 7).save(tmp_path / "photos" / "bird.jpg")
    for path, name in zip(bundles, ("birds", "birds-2", "birds-3"), strict=True):
        shutil.copy(path, tmp_path / f"{name}.safetensors")
    with following("how-to/publish.md", tmp_path, {ADDRESS: server.url}) as printed:
        assert "served 100.0%, candidate 100.0%" in printed
    with Client(server.url) as client:
        birds = client.task("birds")
    assert birds.aliases == {"candidate": 3, "default": 3}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_published_script_refuses_a_worse_candidate(server, bundles, tmp_path):
    good = TaskBundle.load(bundles[0])
    labels = (*good.labels[1:], good.labels[0])  # always wrong
    manifest = good.manifest.model_copy(update={"labels": labels})
    replace(good, manifest=manifest).save(tmp_path / "worse.safetensors")
    class_folders(tmp_path / "images", each=2, seed=1)
    (script,) = (
        block.content
        for block in blocks_of(read_page("how-to/publish.md"))
        if "cat > publish.sh" in block.content
    )
    with Client(server.url) as client:
        client.push(bundles[0], "wildlife")
        terminal = Terminal(
            f"{script} sh publish.sh worse.safetensors wildlife images",
            tmp_path,
            page_environment(engram_server=server.url),
        )
        printed = terminal.read()
        assert terminal.process.wait() == 1, printed
        assert "served 100.0%, candidate 0.0%" in printed
        assert client.task("wildlife").aliases == {"candidate": 2, "default": 1}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rolling_back(server, bundles, tmp_path):
    (tmp_path / "photos").mkdir()
    whole_picture("red", 7).save(tmp_path / "photos" / "cat.png")
    (tmp_path / "tasks").symlink_to(server.log.parent / "store")
    with Client(server.url) as client:
        for path in bundles[:2]:
            client.push(path, "pets")
        with following("how-to/roll-back.md", tmp_path, {}, engram_server=server.url):
            pets = client.task("pets")
    assert pets.aliases == {"default": 1}
    assert [one.version for one in pets.version_details] == [1]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_teaching(server, tmp_path):
    class_folders(tmp_path / "photos", each=4, colours=("red", "blue"))
    class_folders(tmp_path / "more", each=2, colours=("red", "green"), seed=1)
    whole_picture("green", 7).save(tmp_path / "new.png")
    with (
        following("how-to/teach.md", tmp_path, {}, engram_server=server.url),
        Client(server.url) as client,
    ):
        colours = client.task("colours")
    assert colours.class_labels == ("blue", "green", "red")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_operating(tmp_path):
    port = free_port()
    replaced = {ADDRESS: f"http://127.0.0.1:{port}"}
    with following("how-to/operate.md", tmp_path, replaced, engram_port=port) as printed:
        pass
    assert '"ready":true' in printed.replace(" ", "")
    assert '"path": "/tasks/flowers"' in printed
    assert "cifar10, cifar100, flowers" in printed
    assert (tmp_path / "keys").stat().st_mode & 0o077 == 0


@pytest.mark.long
@pytest.mark.timeout(600)
def test_batch_inference(tmp_path):
    shutil.copytree(PHOTOS, tmp_path / "photos")
    publish_demo_tasks(open_store(tmp_path / ".engram" / "store"))
    labels = {"cat": "animal", "dog": "animal", "horse": "animal", "camel": "animal"}
    labels |= {"bridge": "thing", "castle": "thing", "coffee": "thing", "rocket": "thing"}
    lines = ["path,label", *(f"{name}.jpg,{label}" for name, label in labels.items())]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    with following("how-to/batch.md", tmp_path, {}) as printed:
        assert "flowers_label" in printed
    assert (tmp_path / "flowers.safetensors").exists()
    count = len(list(PHOTOS.glob("*.jpg")))
    with (tmp_path / "new.csv" / "part-00000.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == count


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_migrating(server, data, tmp_path):
    for split, each in (("train", 6), ("val", 2), ("test", 3)):
        class_folders(tmp_path / "data" / "plates" / split, each=each, seed=each)
    images = sorted((tmp_path / "data" / "plates" / "test").rglob("*.png"))
    with (tmp_path / "old.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["image", "label"])
        table.writerows([path.relative_to(tmp_path), "blue"] for path in images)
    whole_picture("red", 7).save(tmp_path / "photo.jpg")
    seed = data / "reproduction-oracle"
    shutil.copy(seed / "CIFAR100_model.pt", tmp_path)
    shutil.copytree(seed / "backbone", tmp_path / "backbone")
    probe = make_linear_probe(tmp_path / "backbone", tmp_path / "linear-probe")

    with following("how-to/migrate.md", tmp_path, {ADDRESS: server.url}) as printed:
        assert re.search(r"of 12 images \d are won and 0 lost", printed)
    model = MultiTaskViT(load_backbone(tmp_path / "backbone"))
    model.add("probe", TaskBundle.load(tmp_path / "probe.safetensors"))
    pixels = torch.randn(2, 3, *model.backbone.image_size)
    with torch.no_grad():
        torch.testing.assert_close(
            model(pixels, ["probe"])["probe"], probe(pixels).logits, atol=1e-4, rtol=0
        )


def make_linear_probe(backbone: Path, folder: Path) -> ViTForImageClassification:
    """The same backbone with another head, saved."""
    shutil.copytree(backbone, folder)
    model = ViTForImageClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        model.classifier.weight.normal_()
    model.save_pretrained(folder)
    return model


# --- image formats --------------------------------------------------------------------------------


def test_the_formats_of_images_are_those_with_a_decoder():
    section = read_page("reference/http-api.md").partition("### Image formats")[2]
    rows = re.findall(r"^\| ([A-Z]+)[ ,]", section.partition("\n#")[0], re.M)
    assert sorted(rows) == sorted(DECODERS)
    named = SUPPORTED.partition(": ")[2].upper().split(", ")
    assert sorted(named) == sorted(DECODERS)
