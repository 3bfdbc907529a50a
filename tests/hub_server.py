"""A stand-in for the Hugging Face hub: what `huggingface_hub` asks of its HTTP API, in memory."""

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_right"
Files = dict[str, bytes]

_RESOLVE = re.compile(r"/(?P<repo>[\w.-]+/[\w.-]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
_API = re.compile(r"/api/models/(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<what>\w+)/(?P<revision>[^/?]+))?")


@dataclass
class Repository:
    private: bool
    commits: dict[str, Files] = field(default_factory=dict)  # oldest first
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: Files) -> str:
        whole = {**self.files("main"), **files} if self.commits else dict(files)
        name = hashlib.sha1(repr((len(self.commits), sorted(whole))).encode()).hexdigest()
        self.commits[name] = whole
        return name

    def find(self, revision: str) -> str | None:
        if revision == "main":
            return list(self.commits)[-1]
        revision = self.tags.get(revision, revision)
        return revision if revision in self.commits else None

    def files(self, revision: str) -> Files:
        return self.commits[self.find(revision)]


@dataclass
class Hub:
    url: str
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)

    def environment(self, cache, token: str | None = TOKEN) -> dict[str, str]:
        """The variables of a process that uses it."""
        variables = {"HF_ENDPOINT": self.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}
        return variables if token is None else {**variables, "HF_TOKEN": token}


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def _reply(self, status: int, body=b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    @property
    def _authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, *, write: bool = False) -> Repository | None:
        """The repository if the caller may use it; otherwise the refusal is sent."""
        found = self.hub.repositories.get(name)
        if self.headers.get("Authorization") and not self._authorized:
            self._reply(
                401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials"
            )
        elif found is None or ((found.private or write) and not self._authorized):
            # As the hub: a private repository does not exist for others.
            self._reply(401 if not self._authorized else 404, X_Error_Code="RepoNotFound")
        else:
            return found
        return None

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        path = self.path.partition("?")[0]
        if match := _RESOLVE.fullmatch(path):
            self._resolve(match)
        elif match := _API.fullmatch(path):
            self._describe(match)
        else:
            self._reply(404)

    def _resolve(self, match: re.Match) -> None:
        if (repository := self._repository(match["repo"])) is None:
            return
        commit = repository.find(match["revision"])
        if commit is None:
            self._reply(404, X_Error_Code="RevisionNotFound")
            return
        content = repository.commits[commit].get(match["file"])
        if content is None:
            self._reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        self._reply(200, content, ETag=etag, X_Repo_Commit=commit)

    def _describe(self, match: re.Match) -> None:
        if (repository := self._repository(match["repo"])) is None:
            return
        commit = repository.find(match["revision"] or "main")
        files = repository.commits[commit]
        siblings = [{"rfilename": name} for name in files]
        self._reply(200, {"id": match["repo"], "sha": commit, "siblings": siblings})

    def do_POST(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        body, path = self._body(), self.path.partition("?")[0]
        match = _API.fullmatch(path)
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._reply(200, {"errors": [], "warnings": []})
        elif match is None or (repository := self._repository(match["repo"], write=True)) is None:
            if match is None:
                self._reply(404)
        elif match["what"] == "preupload":
            names = [each["path"] for each in json.loads(body)["files"]]
            modes = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names
            ]
            self._reply(200, {"files": modes})
        elif match["what"] == "commit":
            lines = [json.loads(line) for line in body.splitlines()]
            files = {
                each["value"]["path"]: base64.b64decode(each["value"]["content"])
                for each in lines
                if each["key"] == "file"
            }
            oid = repository.commit(files)
            url = f"{self.hub.url}/{match['repo']}/commit/{oid}"
            self._reply(200, {"success": True, "commitOid": oid, "commitUrl": url})
        else:
            self._reply(404)

    def _create(self, request: dict) -> None:
        if not self._authorized:
            self._reply(
                401, {"error": "Invalid credentials"}, X_Error_Message="Invalid credentials"
            )
            return
        name = f"{request['organization']}/{request['name']}"
        if name in self.hub.repositories:
            self._reply(409, {"error": "exists", "url": f"{self.hub.url}/{name}"})
            return
        self.hub.repositories[name] = Repository(request.get("visibility") == "private")
        self._reply(200, {"url": f"{self.hub.url}/{name}", "name": name})
