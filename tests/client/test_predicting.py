"""Lists of images through both clients: order, failures, and what is kept when one breaks off."""

import asyncio
import inspect
import json
import threading
import time
from contextlib import aclosing

import httpx
import pytest
from engram_vit import Answers, AsyncClient, Client
from engram_vit.answers import PublishResult, TeachResult
from engram_vit.errors import (
    AccessDenied,
    ConnectionFailed,
    DeadlineExceeded,
    ImageError,
    NotFound,
    ResponseTimeout,
    ServerBusy,
    UsageError,
)
from engram_vit.predicting import BATCH_IMAGES

from tests.client.fake_server import DIGEST, Fake, digest_of, problem

URL = "http://server:1"


def bodies(count):
    return [f"image-{number:04}".encode() for number in range(count)]


def labels(answers):
    return [answer.top["pets"].label for answer in answers]


def expected(count):
    return [body.decode() for body in bodies(count)]


class Blocking:
    """The blocking client, as tests call it."""

    @staticmethod
    def predict(fake, *arguments, concurrency=4, patience=60.0, **options):
        transport = httpx.MockTransport(fake)
        with Client(URL, transport=transport, concurrency=concurrency, patience=patience) as client:
            return client.predict(*arguments, **options)

    @staticmethod
    def iterate(fake, seen, *arguments, concurrency=4, **options):
        with Client(URL, transport=httpx.MockTransport(fake), concurrency=concurrency) as client:
            seen.extend(client.predict_iter(*arguments, **options))


class Awaited:
    """The same of the client for asyncio."""

    @staticmethod
    def predict(fake, *arguments, concurrency=4, patience=60.0, **options):
        async def run():
            transport = httpx.MockTransport(fake)
            async with AsyncClient(
                URL, transport=transport, concurrency=concurrency, patience=patience
            ) as client:
                return await client.predict(*arguments, **options)

        return asyncio.run(run())

    @staticmethod
    def iterate(fake, seen, *arguments, concurrency=4, **options):
        async def run():
            transport = httpx.MockTransport(fake)
            async with AsyncClient(URL, transport=transport, concurrency=concurrency) as client:
                async for answer in client.predict_iter(*arguments, **options):
                    seen.append(answer)

        asyncio.run(run())


@pytest.fixture(params=[Blocking, Awaited], ids=["blocking", "asyncio"])
def either(request):
    return request.param


# --- what comes back ------------------------------------------------------------------------------


def test_answers_are_in_order_whatever_finishes_first(either):
    def slower_first(images, count):
        time.sleep(0.02 if images[0] < b"image-0030" else 0)

    fake = Fake(slower_first if either is Blocking else None)
    answers = either.predict(fake, bodies(100), "pets")
    assert labels(answers) == expected(100)
    assert [answer.index for answer in answers] == list(range(100))
    assert all(len(batch) <= BATCH_IMAGES for batch in fake.image_batches)
    assert answers[3].digest == digest_of(b"image-0003")
    assert (answers[0].generation, answers[0].backbone) == (7, "fake")


def test_one_image_needs_no_list(either):
    assert labels(either.predict(Fake(), b"image-0000", "pets")) == ["image-0000"]


def test_an_empty_list_asks_nothing(either):
    fake = Fake()
    assert either.predict(fake, [], "pets") == Answers()
    assert not fake.image_batches


def test_options_become_the_query(either):
    fake = Fake()
    either.predict(fake, b"x", ["pets", "scene@3"], top_k=2, threshold=0.1, returns="logits")
    assert dict(fake.requests[0].url.params) == {
        "tasks": "pets,scene@3",
        "top_k": "2",
        "threshold": "0.1",
        "return": "logits",
    }


def test_no_tasks_is_every_ready_task_and_an_empty_list_of_them_is_a_mistake(either):
    fake = Fake()
    either.predict(fake, b"x")
    assert "tasks" not in fake.requests[0].url.params
    with pytest.raises(UsageError, match="`tasks` is empty"):
        either.predict(fake, b"x", [])


def test_paths_and_digests_may_be_mixed(either, tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"from a file")
    answers = either.predict(Fake(), [tmp_path / "a.jpg", DIGEST, b"bytes"], "pets")
    assert labels(answers) == ["from a file", DIGEST[:40], "bytes"]
    names = [answer.image for answer in answers]
    assert names == [str(tmp_path / "a.jpg"), DIGEST, "image 2"]


def test_large_images_go_in_smaller_requests(either, monkeypatch):
    monkeypatch.setattr("engram_vit.predicting.BATCH_BYTES", 100)
    fake = Fake()
    sizes = [40, 40, 40, 200, 10]
    either.predict(fake, [b"x" * size for size in sizes], "pets", concurrency=1)
    assert [[len(body) for body in batch] for batch in fake.image_batches] == [
        [40, 40],
        [40],
        [200],
        [10],
    ]


def test_progress_counts_to_the_end(either):
    calls = []
    either.predict(Fake(), bodies(40), "pets", progress=lambda *counts: calls.append(counts))
    assert calls == [(number, 40) for number in range(1, 41)]


def test_a_generator_is_read_only_as_far_as_needed():
    read = []

    def endless():
        for body in bodies(10_000):
            read.append(body)
            yield body

    with Client(URL, transport=httpx.MockTransport(Fake()), concurrency=2) as client:
        answers = client.predict_iter(endless(), "pets")
        assert next(answers).top["pets"].label == "image-0000"
        assert len(read) <= 3 * BATCH_IMAGES + 1
        answers.close()


def test_an_asynchronous_list_may_be_left_early():
    async def run():
        fake = Fake()
        async with AsyncClient(URL, transport=httpx.MockTransport(fake), concurrency=2) as client:
            async with aclosing(client.predict_iter(bodies(1000), "pets")) as answers:
                async for answer in answers:
                    assert answer.index == 0
                    break
            return len(fake.image_batches)

    assert asyncio.run(run()) <= 3


# --- what goes wrong ------------------------------------------------------------------------------


def unreadable(bad):
    def refuse(images, count):
        if any(body in bad for body in images):
            return problem(422, "unreadable-image", "The bytes look like text.")
        return None

    return refuse


def test_one_bad_image_is_named_and_all_others_are_kept(either):
    fake = Fake(unreadable([b"image-0021"]))
    with pytest.raises(ImageError) as raised:
        either.predict(fake, bodies(40), "pets", concurrency=1)
    error = raised.value
    assert (error.image, error.index) == ("image 21", 21)
    assert str(error) == "image 21: The bytes look like text."
    # Also the rest of its own request was answered.
    assert labels(error.answered) == [name for name in expected(32) if name != "image-0021"]


def test_keeping_going_answers_all_but_the_bad(either, tmp_path):
    images = [*bodies(40), tmp_path / "missing.jpg", b"", 3.5]
    fake = Fake(unreadable([b"image-0021", b"image-0022"]))
    answers = either.predict(fake, images, "pets", keep_going=True)
    failed = {answer.index: answer.error for answer in answers if answer.error}
    assert failed == {
        21: "The bytes look like text.",
        22: "The bytes look like text.",
        40: "The file does not exist.",
        41: "The image is empty.",
        42: "float is not an image. Use a path, bytes, a Pillow image, a numpy array or a digest.",
    }
    assert len(answers) == 43
    good = [answer for answer in answers if not answer.error]
    assert labels(good) == [body.decode() for body in bodies(40) if body[-2:] not in (b"21", b"22")]


@pytest.mark.parametrize("kind", ["too-many-images", "body-too-large"])
def test_requests_shrink_to_what_the_server_accepts(either, kind):
    def refuse(images, count):
        status = 422 if kind == "too-many-images" else 413
        return problem(status, kind, "Too much.") if len(images) > 4 else None

    fake = Fake(refuse)
    assert labels(either.predict(fake, bodies(64), "pets", concurrency=1)) == expected(64)
    # Learnt once, not again with every request.
    assert sum(len(batch) > 4 for batch in fake.image_batches) <= 4


def away_from(first):
    """A server that vanishes at one of its requests."""

    def refuse(images, count):
        return httpx.ConnectError("Connection refused") if count >= first else None

    return refuse


def test_a_server_that_leaves_mid_list_takes_no_answer_with_it(either):
    with pytest.raises(ConnectionFailed) as raised:
        either.predict(Fake(away_from(3)), bodies(64), "pets", concurrency=1, patience=0)
    error = raised.value
    assert labels(error.answered) == expected(32)
    assert (error.image, error.index) == ("image 32", 32)
    assert "Connection refused" in str(error)
    assert "The first image without an answer is 'image 32'; the 32 before it" in str(error)


def test_the_iterator_has_handed_out_what_came_before(either, monkeypatch):
    monkeypatch.setattr("engram_vit.core.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("engram_vit.core.LONGEST_PAUSE", 0.002)
    seen = []

    def timeout(images, count):
        return httpx.ReadTimeout("") if images[0] == b"image-0048" else None

    with pytest.raises(ResponseTimeout) as raised:
        either.iterate(Fake(timeout), seen, bodies(64), "pets", concurrency=1)
    assert labels(seen) == expected(48)
    assert raised.value.index == 48
    assert raised.value.answered == ()


def test_answers_beyond_the_failure_are_kept_too():
    """The third request fails when the fourth has been answered already."""
    fourth = threading.Event()

    def refuse(images, count):
        if images[0] == b"image-0048":
            fourth.set()
        if images[0] != b"image-0032":
            return None
        assert fourth.wait(30)
        while sum(thread.name == "engram-vit" for thread in threading.enumerate()) > 1:
            time.sleep(0.001)
        return httpx.ReadTimeout("")

    with pytest.raises(ResponseTimeout) as raised:
        Blocking.predict(Fake(refuse), bodies(64), "pets", concurrency=4)
    places = [answer.index for answer in raised.value.answered]
    assert places == [*range(32), *range(48, 64)]


@pytest.mark.parametrize(
    ("rejection", "expected_error"),
    [
        ((401, "key-required", "Send the key."), AccessDenied),
        ((404, "unknown-task", "No 'pest': did you mean 'pets'?"), NotFound),
        ((429, "overloaded", "Too much.", {"Retry-After": "5"}), ServerBusy),
    ],
    ids=["wrong key", "unknown task", "429 storm"],
)
def test_a_refusal_of_everything_ends_the_list_at_its_first_image(
    either, rejection, expected_error
):
    fake = Fake(lambda *_: problem(*rejection))
    with pytest.raises(expected_error) as raised:
        either.predict(fake, bodies(64), "pets", patience=0, concurrency=1)
    error = raised.value
    assert (error.index, error.image, error.answered) == (0, "image 0", ())


def test_a_storm_that_passes_loses_nothing(either, monkeypatch):
    monkeypatch.setattr("engram_vit.core.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("engram_vit.core.LONGEST_PAUSE", 0.002)

    def refuse(images, count):
        storm = count <= 30 or count % 3
        return problem(429, "overloaded", "Too much.", {"Retry-After": "0"}) if storm else None

    fake = Fake(refuse)
    assert labels(either.predict(fake, bodies(100), "pets")) == expected(100)
    assert len(fake.image_batches) > 30


def test_a_deadline_is_for_the_whole_list(either):
    def slow(images, count):
        time.sleep(0.03)

    with pytest.raises(DeadlineExceeded) as raised:
        either.predict(Fake(slow), bodies(2000), "pets", deadline=1.0, concurrency=1)
    error = raised.value
    assert 0 < len(error.answered) < 2000
    assert error.index == len(error.answered)
    assert labels(error.answered) == expected(error.index)


def test_both_clients_have_the_same_methods():
    def public(cls):
        return {name for name in vars(cls) if not name.startswith("_")}

    assert public(Client) == public(AsyncClient)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_signatures_show_the_result_and_no_internals(kind):
    client = kind("http://127.0.0.1:1")
    shown = inspect.signature(client.push)
    assert shown.return_annotation is PublishResult
    assert list(shown.parameters)[:2] == ["file", "name"]
    assert inspect.signature(client.teach).return_annotation is TeachResult


# --- figures --------------------------------------------------------------------------------------


def test_rows_are_a_data_frame():
    answers = Blocking.predict(Fake(unreadable([b"bad"])), [b"a", b"bad"], "pets", keep_going=True)
    frame = answers.to_pandas()
    assert list(frame.columns) == [
        *("image", "task", "version", "label", "index", "score", "value"),
        *("in_distribution", "error"),
    ]
    assert frame.loc[0, ["image", "task", "label", "score"]].tolist() == [
        "image 0",
        "pets",
        "a",
        0.75,
    ]
    assert frame.loc[1, "error"] == "The bytes look like text."
    assert answers[0].to_pandas().shape == (1, 9)


def test_numbers_of_regression_and_embedding_are_rows_too():
    document = {
        "generation": 1,
        "backbone": "b",
        "images": [
            {
                "digest": DIGEST,
                "cache": "off",
                "tasks": {
                    "age": {"version": 2, "values": [31.5, 2.0]},
                    "face": {"version": 1, "embedding": [0.1]},
                },
            }
        ],
    }

    def handler(request):
        return httpx.Response(200, content=json.dumps(document))

    with Client(URL, transport=httpx.MockTransport(handler)) as client:
        (answer,) = client.predict(b"x")
    assert answer["age"].values == (31.5, 2.0)
    assert answer["age"].top is None
    assert answer.top == {}
    rows = [(row["task"], row["index"], row["value"]) for row in answer.rows()]
    assert rows == [("age", 0, 31.5), ("age", 1, 2.0), ("face", 0, 0.1)]
