"""`engram predict` as scripts and people use it, against a fake server on a real socket."""

import csv
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from engram_server.settings import unknown_variables
from engram_vit.answers import ImageAnswer, Prediction, TaskAnswer
from engram_vit.commands.output import CsvRows, TableRows
from engram_vit.commands.predict import Watch

from tests.client.fake_server import DIGEST, listening, problem
from tests.client.sites import RUN_MAIN


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    for name in ("ENGRAM_SERVER", "ENGRAM_API_KEY", "ENGRAM_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def photos(tmp_path) -> Path:
    """A folder with three images, one of them deep inside, and things that are none."""
    folder = tmp_path / "photos"
    (folder / "deep").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    for name in ("b.jpg", "a.PNG", "deep/c.webp", ".d.jpg", ".hidden/e.jpg", "notes.txt"):
        (folder / name).write_bytes(f"body of {Path(name).name}".encode())
    return folder


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def refuse_b(bodies, count):
    """Everything that has b.jpg in it."""
    if b"body of b.jpg" in bodies:
        return problem(422, "unreadable-image", "The bytes look like text.")
    return None


# --- what is shown --------------------------------------------------------------------------------


def test_in_a_pipe_each_image_is_one_line_of_json(engram, photos):
    with listening() as url:
        outcome = engram("predict", str(photos), "--tasks", "pets,scene", "--server", url)
    assert outcome.code == 0, outcome.err
    found = lines_of(outcome.out)
    assert [Path(one["image"]).name for one in found] == ["a.PNG", "b.jpg", "c.webp"]
    assert list(found[0]["tasks"]) == ["pets", "scene"]
    assert found[0]["tasks"]["pets"] == {
        "version": 1,
        "predictions": [{"label": "body of a.PNG", "index": 0, "score": 0.75}],
    }


def test_csv_has_a_row_for_each_prediction(engram, photos):
    with listening() as url:
        outcome = engram("predict", str(photos / "b.jpg"), DIGEST, "--csv", "--server", url)
    rows = list(csv.DictReader(io.StringIO(outcome.out)))
    assert [row["label"] for row in rows] == ["body of b.jpg", DIGEST[:40]]
    assert rows[0]["score"] == "0.75"


@pytest.fixture
def strange(tmp_path) -> list[str]:
    """An image in distribution, and one out of it."""
    for name in ("yes", "no"):
        (tmp_path / f"{name}.jpg").write_bytes(f"known: {name}".encode())
    return [str(tmp_path / "yes.jpg"), str(tmp_path / "no.jpg")]


def test_every_form_says_whether_the_image_is_in_distribution(engram, strange, photos):
    with listening() as url:
        lines, rows, table = (
            engram("predict", *strange, str(photos / "b.jpg"), form, "--server", url).out
            for form in ("--json", "--csv", "--table")
        )
    tasks = [line["tasks"]["pets"] for line in lines_of(lines)]
    assert [task.get("in_distribution") for task in tasks] == [True, False, None]
    cells = [row["in_distribution"] for row in csv.DictReader(io.StringIO(rows))]
    assert cells == ["true", "false", ""]
    marks = ["(out of distribution)" in line for line in table.splitlines()]
    assert marks == [False, True, False]


def test_hidden_predictions_still_have_a_row(capsys):
    hidden = {"pets": TaskAnswer(1, (), in_distribution=False)}
    CsvRows().show(ImageAnswer("rocket.jpg", 0, tasks=hidden))
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["image"], row["label"], row["in_distribution"]) == ("rocket.jpg", "", "false")
    TableRows(["rocket.jpg"]).show(ImageAnswer("rocket.jpg", 0, tasks=hidden))
    assert capsys.readouterr().out == "rocket.jpg  pets  (out of distribution) –\n"


def test_a_table_has_a_line_for_each_image_and_task(engram, photos):
    with listening() as url:
        outcome = engram(
            "predict", str(photos), "--tasks", "pets,scene", "--table", "--server", url
        )
    lines = [line.split("  ") for line in outcome.out.splitlines()]
    assert len(lines) == 6
    assert lines[0][0].endswith("a.PNG")
    assert outcome.out.splitlines()[1].split() == ["scene", "body", "of", "a.PNG", "75.0%"]


def test_what_strangers_named_does_not_steer_the_terminal(engram, tmp_path):
    evil = tmp_path / "a\x1b[2Jb.jpg"
    evil.write_bytes(b"label \x1b]0;owned\x07")
    with listening() as url:
        outcome = engram("predict", str(evil), "--table", "--server", url)
    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    assert "\x07" not in outcome.out


def test_a_file_name_that_is_no_unicode_is_answered_in_every_form(engram, tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg")
    Path(name).write_bytes(b"x")
    with listening() as url:
        for form in ("--json", "--csv", "--table"):
            outcome = engram("predict", name, form, "--server", url)
            assert outcome.code == 0, outcome.err
            assert "caf" in outcome.out


def test_long_names_keep_their_end(capsys):
    name = "x" * 100 + "/0001.jpg"
    tasks = {"pets": TaskAnswer(1, (Prediction("cat", 0, 0.5),))}
    TableRows([name]).show(ImageAnswer(name, 0, tasks=tasks))
    (line,) = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"…x+/0001\.jpg  pets  cat 50\.0%", line)
    assert len(line) < 80


# --- how it ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_a_bad_image_is_reported_and_the_others_go_on(engram, photos, strict):
    arguments = ["predict", str(photos), str(photos / "none.jpg"), *["--strict"] * strict]
    with listening(refuse_b) as url:
        outcome = engram(*arguments, "--server", url)
    assert outcome.code == strict
    found = {Path(one["image"]).name: one for one in lines_of(outcome.out)}
    assert found["b.jpg"]["error"] == "The bytes look like text."
    assert found["none.jpg"]["error"] == "The file does not exist."
    assert "tasks" in found["c.webp"]
    assert outcome.err == "2 of 4 images could not be read\n"


def test_the_exit_code_is_one_if_no_image_can_be_read(engram, photos):
    with listening(refuse_b) as url:
        outcome = engram("predict", str(photos / "b.jpg"), "--server", url)
    assert outcome.code == 1
    assert outcome.err == "1 of 1 images could not be read\n"


@pytest.mark.parametrize(
    ("rejection", "code"),
    [
        ((401, "key-required", "For predicting send the key."), 4),
        ((404, "unknown-task", "There is no task 'pest': did you mean 'pets'?"), 5),
        ((429, "overloaded", "256 images are being worked on.", {"Retry-After": "9"}), 3),
        ((500, "batch-failed", "The model failed."), 1),
    ],
)
def test_exit_codes_tell_refusals_apart(engram, photos, rejection, code):
    with listening(lambda *_: problem(*rejection)) as url:
        outcome = engram("predict", str(photos), "--server", url, "--patience", "0")
    assert outcome.code == code
    assert outcome.out == ""
    assert outcome.err.startswith(f"error: {rejection[2]}")
    assert "a.PNG" in outcome.err


def test_an_unreachable_server_is_reported_at_once(engram, photos):
    with listening() as url:
        pass
    outcome = engram("predict", str(photos), "--server", url)
    assert outcome.code == 3
    assert outcome.err.startswith(f"error: No connection: {url}")


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["{photos}", "--json", "--table"], "--json and --table are mutually exclusive"),
        (["{photos}", "--csv", "--json"], "--csv cannot be combined with --json or --table"),
        (["{photos}/.hidden/none"], "The file does not exist"),
        (["{photos}/b.jpg", "--watch"], "--watch needs exactly one folder"),
        (["{photos}", "--server", "ftp://x"], "Invalid server address 'ftp://x'"),
    ],
)
def test_wrong_usage_is_a_clear_error(engram, photos, args, complaint):
    outcome = engram("predict", *(arg.format(photos=photos) for arg in args))
    assert outcome.code in (1, 2)
    assert complaint in outcome.err + outcome.out


def test_an_empty_folder_is_an_error(engram, tmp_path):
    outcome = engram("predict", str(tmp_path))
    assert outcome.code == 2
    assert "No images found in" in outcome.err


def test_address_and_key_come_from_the_environment(engram, photos, monkeypatch):
    seen = []
    with listening() as url:
        monkeypatch.setenv("ENGRAM_SERVER", url)
        monkeypatch.setenv("ENGRAM_API_KEY", "secret-key")
        monkeypatch.setattr(
            "engram_vit.commands.predict.Client",
            lambda *arguments, **options: seen.append(arguments) or pytest.fail("seen enough"),
        )
        with pytest.raises(pytest.fail.Exception):
            engram("predict", str(photos))
    assert seen == [(url, "secret-key")]


def test_the_servers_settings_do_not_take_the_clients_variables_for_theirs():
    assert unknown_variables({"ENGRAM_SERVER": "http://x", "ENGRAM_API_KEY": "12345678"}) == []


# --- watching -------------------------------------------------------------------------------------


def test_watching_gives_each_image_once_when_it_no_longer_changes(photos):
    watch = Watch(str(photos))
    assert watch.settled() == []  # perhaps they are still being written
    assert [Path(path).name for path in watch.settled()] == ["a.PNG", "b.jpg", "c.webp"]
    assert watch.settled() == []
    new = photos / "new.jpg"
    new.write_bytes(b"half")
    assert watch.settled() == []
    new.write_bytes(b"the whole of it")
    assert watch.settled() == []
    assert watch.settled() == [str(new)]
    new.unlink()
    assert watch.settled() == []
    new.write_bytes(b"another")
    watch.settled()
    assert watch.settled() == [str(new)]


# --- as a process ---------------------------------------------------------------------------------


def start(*args: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", RUN_MAIN, "predict", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)


def test_a_watched_folder_is_followed_until_interrupted(photos):
    with listening() as url:
        process = start(str(photos), "--watch", "--server", url, stderr=subprocess.PIPE)
        first = [json.loads(process.stdout.readline()) for _ in range(3)]
        (photos / "late.jpg").write_bytes(b"late")
        late = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert len({one["image"] for one in first}) == 3
    assert late["image"] == str(photos / "late.jpg")
    assert (process.returncode, err) == (130, "interrupted\n")


def many(folder: Path, count: int, size: int) -> Path:
    """So many images, which take the disk space of one."""
    folder.mkdir()
    first = folder / "00000.jpg"
    first.write_bytes(os.urandom(size))
    for number in range(1, count):
        os.link(first, folder / f"{number:05}.jpg")
    return folder


def test_an_interruption_loses_nothing_and_does_not_wait(tmp_path):
    """The server hangs from the third request of the list on."""
    hanging = threading.Event()
    for number in range(200):
        (tmp_path / f"{number:05}.jpg").write_text(f"{number:05}")

    def hang(bodies, count):
        if bodies[0] >= b"00032":
            hanging.wait(60)

    with listening(hang) as url:
        process = start(str(tmp_path), "--server", url, stderr=subprocess.PIPE)
        lines = [process.stdout.readline() for _ in range(32)]
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=30)
        hanging.set()
    assert (process.returncode, err) == (130, "interrupted\n")
    assert [Path(one["image"]).stem for one in map(json.loads, lines)] == [
        f"{number:05}" for number in range(32)
    ]
    assert rest == ""


def test_a_server_that_leaves_mid_list_leaves_what_it_answered(tmp_path):
    folder = many(tmp_path / "many", 200, 100)

    def leave(bodies, count):
        return (
            problem(503, "draining", "The server leaves.", {"Retry-After": "9"})
            if count > 4
            else None
        )

    with listening(leave) as url:
        process = start(str(folder), "--server", url, "--patience", "0", stderr=subprocess.PIPE)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 3
    answered = [Path(one["image"]).stem for one in lines_of(out)]
    assert answered == [f"{number:05}" for number in range(len(answered))]
    assert err.startswith("error: The server leaves.")
    assert f"The first image without an answer is '{folder}/{len(answered):05}.jpg'" in err


def peak_bytes(folder: Path, url: str, out: Path, stderr: int) -> int:
    """What a run takes at most, with all its answers in a file."""
    # Read by the process itself: the figure of `wait4` includes its parent's memory.
    about = out.with_suffix(".status")
    program = (
        f"import atexit, shutil\natexit.register(shutil.copy, '/proc/self/status', {str(about)!r})"
    )
    with out.open("w") as file:
        subprocess.run(
            [
                sys.executable,
                "-c",
                f"{program}\n{RUN_MAIN}",
                "predict",
                str(folder),
                "--server",
                url,
            ],
            stdout=file,
            stderr=stderr,
            env={**os.environ, "TERM": "xterm"},
            check=True,
        )
    return int(re.search(r"VmHWM:\s+(\d+) kB", about.read_text()).group(1)) * 1024


class Screen(threading.Thread):
    """A terminal that remembers what was drawn on it."""

    def __init__(self):
        super().__init__(daemon=True)
        self.ours, self.theirs = pty.openpty()
        self.drawn = b""

    def run(self) -> None:
        try:
            while piece := os.read(self.ours, 65536):
                self.drawn += piece
        except OSError:
            pass  # the other end was closed

    def close(self) -> str:
        os.close(self.theirs)
        self.join(timeout=30)
        os.close(self.ours)
        return self.drawn.decode(errors="replace")


@pytest.mark.long
@pytest.mark.slow
def test_ten_thousand_images_take_no_more_memory_than_a_hundred_and_show_a_bar(tmp_path):
    few = many(tmp_path / "few", 100, 20_000)
    lots = many(tmp_path / "lots", 10_000, 20_000)  # 200 MB to read and to send
    screen = Screen()
    screen.start()
    with listening() as url:
        before = peak_bytes(few, url, tmp_path / "few.jsonl", screen.theirs)
        after = peak_bytes(lots, url, tmp_path / "lots.jsonl", screen.theirs)
    drawn = screen.close()
    with (tmp_path / "lots.jsonl").open() as file:
        names = [Path(json.loads(line)["image"]).stem for line in file]
    assert names == [f"{number:05}" for number in range(10_000)]
    assert after - before < 20 * 2**20
    assert re.search(r"predicting.*\d+/10000", drawn)
