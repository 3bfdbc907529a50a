"""The TypeScript client against a real server: clients/typescript/test, run by Node."""

import contextlib
import functools
import http.server
import threading

import pytest
from engram_server.access.quotas import KeyLimits

from tests.api.keys import make_key, sends, write_keys
from tests.conftest import PHOTOS
from tests.e2e.browser import WAIT_MS
from tests.e2e.server_process import serving
from tests.e2e.typescript import CLIENT, build_client, run_node

SCOPES = {"predict": ["*"], "read": ["*"]}
KEYS = (
    make_key("fast", scopes=SCOPES),
    make_key("slow", KeyLimits(requests_per_second=1), scopes=SCOPES),
)


# What a page of another site does with the client.
PAGE = """async ([origin, server, key, slow]) => {
  const { EngramClient } = await import(`${origin}/dist/index.js`);
  const image = await (await fetch(`${origin}/cat.jpg`)).blob();
  const engram = new EngramClient(server, { key });
  const seen = [];
  for await (const { result } of engram.stream([image, image], { tasks: ["cifar10"] })) {
    seen.push(result.tasks.cifar10.predictions[0].label);
  }
  const unknown = await engram.predict(image, { tasks: ["cifar"] }).catch((error) => error.kind);
  const wrong = new EngramClient(server, { key: "wrong" });
  const refused = await wrong.tasks().catch((error) => error.kind);
  const limited = new EngramClient(server, { key: slow, retries: 0 });
  await limited.tasks();
  const retryAfter = await limited.tasks().catch((error) => error.retryAfter);
  return { seen, unknown, refused, retryAfter, tasks: (await engram.tasks()).length > 4 };
}"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of a site with the client and a photo."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "index.html").write_text("<!doctype html><title>A page</title>")
    (folder / "dist").symlink_to(CLIENT / "dist")
    (folder / "cat.jpg").symlink_to(PHOTOS / "cat.jpg")
    handler = functools.partial(QuietHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{site.server_port}"
        site.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory, site):
    folder = tmp_path_factory.mktemp("typescript")
    keys = write_keys(folder / "keys.json", *KEYS)
    with serving(folder, keys_file=keys, cors_origins=site) as server:
        yield server


def test_the_client_does_what_its_tests_say(server):
    build_client()
    variables = {
        "ENGRAM_SERVER": server.url,
        "ENGRAM_KEY": sends("fast")["X-API-Key"],
        "SLOW_KEY": sends("slow")["X-API-Key"],
        "PHOTOS": str(PHOTOS),
    }
    printed = run_node("--test", "test/client.test.js", folder=CLIENT, **variables)
    assert "# fail 0" in printed or "ℹ fail 0" in printed


def test_a_page_of_a_listed_site_uses_the_client(server, site, browser):
    build_client()
    keys = [sends(name)["X-API-Key"] for name in ("fast", "slow")]
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(site)
        assert page.evaluate(PAGE, [site, server.url, *keys]) == {
            "seen": ["cat", "cat"],
            "unknown": "unknown-task",
            "refused": "key-required",
            "retryAfter": 1,
            "tasks": True,
        }


def test_a_keyed_server_shows_its_documentation_to_a_browser(server, browser):
    with contextlib.closing(browser.new_context()) as context:
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{server.url}/docs")
        page.wait_for_selector("#operations-predict-predict")
