"""Each kind of source lists its images in a stable order and reads them."""

import csv
import io
import json
import tarfile
from pathlib import Path

import boto3
import pyarrow
import pyarrow.parquet
import pytest
from engram_server.batch.sources import open_source
from engram_server.errors import UnreadableSource

from tests.serving import photo


def read_all(name, column=None, lines=()):
    source = open_source(str(name), column, lines)
    return {key: source.read(index) for index, key in enumerate(source.keys)}


@pytest.fixture(scope="module")
def files(photos) -> dict[str, bytes]:
    """The photos by path, in order."""
    paths = [*sorted(photos.glob("a/*.png")), *sorted(photos.glob("b/*.png"))]
    return {str(path): path.read_bytes() for path in paths}


def test_folder_is_searched_for_photos_in_order(photos, files):
    found = read_all(photos)
    assert found == files
    assert list(found) == list(files)


def test_file_url_is_a_folder(photos, files):
    assert read_all(f"file://{photos}") == files


def test_glob_selects_files(photos, files):
    found = read_all(photos / "**" / "[3-5].png")
    assert [Path(key).name for key in found] == ["4.png", "3.png", "5.png"]
    assert found.items() <= files.items()


def test_single_image_is_a_source(files):
    path = next(iter(files))
    assert read_all(path) == {path: files[path]}


def test_standard_input_has_one_path_per_line(files):
    paths = list(files)[::-1]
    assert list(read_all("-", lines=[f"{path}\n" for path in paths] + ["\n"])) == paths


def test_objects_below_a_prefix(s3):
    bucket = boto3.client("s3", endpoint_url=s3.environment["AWS_ENDPOINT_URL"])
    for name in ("photos/b #1?.png", "photos/a/x.jpg", "photos/notes.txt", "photos-2/y.png"):
        bucket.put_object(Bucket="tasks", Key=name, Body=name.encode())
    bucket.close()
    expected = ["photos/a/x.jpg", "photos/b #1?.png"]
    found = read_all("s3://tasks/photos/")
    assert found == {f"s3://tasks/{name}": name.encode() for name in expected}
    lines = ["s3://tasks/photos/notes.txt"]
    assert read_all("-", lines=lines) == {lines[0]: b"photos/notes.txt"}
    source = open_source("-", None, ["s3://tasks/absent.png"])
    with pytest.raises(FileNotFoundError):
        source.read(0)


def test_unreachable_bucket_is_named(monkeypatch, s3):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(UnreadableSource, match="Cannot list 's3://absent/x'"):
        open_source("s3://absent/x", None, ())


@pytest.mark.parametrize(("suffix", "column"), [("csv", None), ("csv", "photo"), ("jsonl", None)])
def test_tables_of_paths(photos, files, tmp_path_factory, suffix, column):
    name = column or "path"
    paths = [str(Path(path).relative_to(photos)) for path in files]
    table = photos / f"list.{suffix}"
    rows = [{"id": number, name: path} for number, path in enumerate(paths)]
    with table.open("w", newline="") as file:
        if suffix == "csv":
            writer = csv.DictWriter(file, ["id", name])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    found = read_all(table, column)
    table.unlink()
    assert list(found) == paths
    assert list(found.values()) == list(files.values())


@pytest.mark.parametrize("form", ["path", "bytes", "struct"])
def test_parquet_has_paths_bytes_or_structs_of_bytes(files, tmp_path, form):
    cells = {
        "path": list(files),
        "bytes": list(files.values()),
        "struct": [{"bytes": data, "path": None} for data in files.values()],
    }[form]
    path = tmp_path / "images.parquet"
    table = pyarrow.table({"id": list(range(len(cells))), "image": cells})
    pyarrow.parquet.write_table(table, path, row_group_size=3)
    found = read_all(path)
    assert list(found.values()) == list(files.values())
    assert list(found) == (
        list(files) if form == "path" else [f"{path}#{row}" for row in range(len(files))]
    )


def test_tar_files_have_images_beside_other_files(files, tmp_path):
    for shard in range(2):
        with tarfile.open(tmp_path / f"{shard}.tar", "w") as archive:
            for number, data in enumerate(files.values()):
                for name, content in ((f"{number}.png", data), (f"{number}.json", b"{}")):
                    about = tarfile.TarInfo(f"shard/{name}")
                    about.size = len(content)
                    archive.addfile(about, io.BytesIO(content))
    one = read_all(tmp_path / "0.tar")
    assert list(one) == [f"{tmp_path}/0.tar/shard/{number}.png" for number in range(len(files))]
    assert list(one.values()) == list(files.values())
    assert len(read_all(tmp_path / "*.tar")) == 2 * len(files)


@pytest.mark.parametrize("damage", ["truncated", "compressed"])
def test_incomplete_and_compressed_tar_files_are_rejected(tmp_path, damage):
    path = tmp_path / ("photos.tar" if damage == "truncated" else "photos.tar.gz")
    with tarfile.open(path, "w" if damage == "truncated" else "w:gz") as archive:
        about = tarfile.TarInfo("0.png")
        about.size = 50_000
        archive.addfile(about, io.BytesIO(bytes(about.size)))
    if damage == "truncated":
        path.write_bytes(path.read_bytes()[:40_000])
    with pytest.raises(UnreadableSource, match="not a complete, uncompressed tar file"):
        open_source(str(path), None, ())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent", None, "'absent' does not exist"),
        ("*.png", None, r"No images found in '\*.png'"),
        ("ftp://host/x", None, "Unknown scheme 'ftp://'"),
        ("list.csv", b"id,name\n1,x\n", "no column with a usual name; its columns are id, name"),
        ("list.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("list.jsonl", b'{"path": 3}\n', "line 1 has no text in 'path'"),
        ("list.jsonl", b"{", "cannot be read as a table"),
        ("list.parquet", b"nonsense", "cannot be read as Parquet"),
        ("photos.tar", b"nonsense" * 200, "not a complete, uncompressed tar file"),
    ],
)
def test_unusable_sources_are_explained(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UnreadableSource, match=message):
        open_source(name, None, ())


def test_folder_that_disappears_is_an_error_of_the_source(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(2):
        (tmp_path / "photos" / f"{number}.png").write_bytes(photo())
    source = open_source(str(tmp_path / "photos"), None, ())
    (tmp_path / "photos" / "0.png").unlink()
    with pytest.raises(FileNotFoundError):
        source.read(0)
    (tmp_path / "photos").rename(tmp_path / "elsewhere")
    with pytest.raises(UnreadableSource, match="does not exist any more"):
        source.read(1)
