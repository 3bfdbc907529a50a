"""`engram search` over kept embeddings: exact, whatever the size of its blocks."""

import csv
import io
import json

import numpy as np
import pytest
import typer
from engram_server.batch.setup import Keep
from engram_server.commands.search import search
from engram_server.errors import TaskMismatch, UnreadableImage
from engram_server.parts import search as searching
from engram_server.parts.kept import KeptFolder
from engram_vit.errors import UsageError
from typer.testing import CliRunner

from tests.serving import photo

runner = CliRunner()


@pytest.fixture
def source(tmp_path):
    """Twelve photos; 03 and 09 are the same, and 05 cannot be read."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number:02}.png").write_bytes(photo(3 if number == 9 else number))
    (folder / "05.png").write_text("not an image")
    return folder


@pytest.fixture(params=["embeddings", "summaries"])
def kept(run, source, tmp_path, request):
    run(source, tasks=[], out=None, keep=Keep(request.param, tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def find(kept, folder_of, monkeypatch):
    """`find(*arguments)`: the results, as JSON."""
    monkeypatch.setenv("ENGRAM_BACKBONE", str(folder_of("vit")))
    monkeypatch.setenv("ENGRAM_DEVICES", "cpu")
    monkeypatch.setattr(searching, "BLOCK", 5)
    app = typer.Typer()
    app.command()(search)

    def find(*arguments):
        words = [str(word) for word in (kept, *arguments)]
        result = runner.invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.stdout if {"--csv", "--table"} & set(words) else json.loads(result.stdout)

    return find


def cosines(kept):
    """All similarities, in the slow, obvious way."""
    folder = KeptFolder.open(kept)
    rows = [folder.readouts([index])[0, : folder.embedding_width] for index in range(len(folder))]
    rows = [row.astype(np.float64) for row in rows]
    lengths = [np.linalg.norm(row) or 1 for row in rows]
    return np.array([[a @ b / c / d for b, d in zip(rows, lengths, strict=True)]
                     for a, c in zip(rows, lengths, strict=True)])  # fmt: skip


def test_photos_like_one_are_ordered_by_cosine(find, kept, source):
    found = find("--like", source / "03.png", "--top", 20)
    assert len(found) == 11, "not the one that cannot be read"
    assert {found[0]["path"][-6:], found[1]["path"][-6:]} == {"03.png", "09.png"}
    assert found[0]["similarity"] == pytest.approx(1, abs=1e-3)
    expected = cosines(kept)[3]
    for one in found:
        assert one["like"] == str(source / "03.png")
        assert one["similarity"] == pytest.approx(expected[int(one["path"][-6:-4])], abs=2e-3)
    similarities = [one["similarity"] for one in found]
    assert similarities == sorted(similarities, reverse=True)
    assert find("--like", source / "03.png", "--top", 4) == found[:4]
    enough = [one for one in found if one["similarity"] >= 0.9]
    assert find("--like", source / "03.png", "--min-similarity", 0.9) == enough


def test_several_photos_find_what_is_like_any_of_them(find, source, tmp_path):
    examples = tmp_path / "examples"
    examples.mkdir()
    for number in (1, 7):
        (examples / f"{number}.png").write_bytes(photo(number))
    found = {one["path"][-6:]: one["like"] for one in find("--like", examples, "--top", 2)}
    assert found == {"01.png": str(examples / "1.png"), "07.png": str(examples / "7.png")}


def test_duplicates_are_pairs_and_each_once(find, kept):
    (best,) = find("--duplicates", "--top", 1)
    assert (best["path"][-6:], best["like"][-6:]) == ("03.png", "09.png")
    everything = find("--duplicates", "--min-similarity", -1, "--top", 100)
    pairs = [(int(one["path"][-6:-4]), int(one["like"][-6:-4])) for one in everything]
    assert len(pairs) == len(set(pairs)) == 12 * 11 // 2
    assert all(first < second for first, second in pairs)
    expected = cosines(kept)
    for one, (first, second) in zip(everything, pairs, strict=True):
        assert one["similarity"] == pytest.approx(expected[first, second], abs=1e-3)


@pytest.mark.parametrize("written", ["as listed", "relative to the source", "beside the table"])
def test_labelled_photos_are_left_out_and_what_is_like_them_is_found(
    find, kept, source, tmp_path, written
):
    names = {
        "as listed": (tmp_path, [str(source / "03.png"), str(source / "04.png")]),
        "relative to the source": (tmp_path, ["03.png", "04.png"]),
        "beside the table": (source, ["./03.png", "./04.png"]),
    }
    folder, paths = names[written]
    table = folder / "labels.csv"
    table.write_text("path,label\n" + "".join(f"{path},x\n" for path in paths))
    found = find("--labelled", table)
    assert len(found) == 9
    assert (found[0]["path"][-6:], found[0]["like"][-6:]) == ("09.png", "03.png")
    like_one = find("--like", source / "04.png", "--labelled", table)
    assert {one["path"][-6:] for one in like_one}.isdisjoint({"03.png", "04.png"})


def test_table_and_csv(find, source):
    rows = list(csv.DictReader(io.StringIO(find("--like", source / "00.png", "--csv"))))
    assert (rows[0]["path"], rows[0]["similarity"]) == (str(source / "00.png"), "1.0")
    assert "similarity" in find("--like", source / "00.png", "--table")


def test_what_cannot_be_searched_is_explained(find, kept, source, tmp_path):
    for arguments, error, said in (
        ((), UsageError, "Nothing to search for"),
        (("--duplicates", "--like", source / "00.png"), UsageError, "cannot be combined"),
        (("--like", source / "05.png"), UnreadableImage, r"05\.png"),
        (("--labelled", tmp_path / "other.csv"), UsageError, "No path of"),
    ):
        (tmp_path / "other.csv").write_text("path,label\nnowhere.png,x\n")
        with pytest.raises(error, match=said):
            find(*arguments)
    manifest = kept / "_manifest.json"
    manifest.write_text(manifest.read_text().replace('"precision": "float32"', '"precision": "x"'))
    with pytest.raises(TaskMismatch, match="precision was"):
        find("--like", source / "00.png")
