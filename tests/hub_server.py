"""A hub on this machine, for `huggingface_hub`: the routes by which it looks models up and downloads them."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_reader"


@dataclass
class Repo:
    """A model of the hub."""

    files: dict[str, bytes]
    gated: bool = False
    private: bool = False
    sizes: dict[str, int] = field(default_factory=dict)  # that the hub says its files have, where they are others

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files)).encode()).hexdigest()


@dataclass
class Hub:
    """A hub with these models by id, on a free port.

    Args:
        moved: old ids of models, and what they are called now.
    """

    repos: dict[str, Repo]
    moved: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str]] = field(default_factory=list)  # methods, and paths, of all requests
    refuses: int = 0  # a status that every request gets
    cuts: int = 0  # how many downloads of large files are still to end after half of their bytes
    holds: threading.Event | None = None  # what large files wait for, once a part of them is sent

    def __post_init__(self) -> None:
        hub = self

        class Handler(HubHandler):
            of = hub

        self.server = HubServer(("127.0.0.1", 0), Handler)
        self.url = f"http://localhost:{self.server.server_port}"
        self.large_files = f"http://127.0.0.1:{self.server.server_port}/cdn"  # from another host, as those of the hub
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()

    def close(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()

    def downloaded(self, name: str) -> list[str]:
        """The files of a model whose bytes were asked for, each as often as that, in alphabetical order."""
        head = f"/cdn/{name}/"
        return sorted(path.removeprefix(head) for method, path in self.asked if method == "GET" and head in path)


class HubServer(ThreadingHTTPServer):
    """A server whose threads end with the tests, and that does not mind clients that leave."""

    daemon_threads = True

    def handle_error(self, *args: Any) -> None:
        pass


class HubHandler(BaseHTTPRequestHandler):
    """Answers one request. Files are behind a redirect to /cdn/, as those of the hub are that git-lfs keeps."""

    of: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.of, unquote(urlsplit(self.path).path)
        hub.asked.append((self.command, path))
        if hub.refuses:
            return self.answer(hub.refuses, {"X-Error-Message": "the hub is having a bad day"})
        if found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            return self.send_file(hub.repos[found[1]].files[found[2]])
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path)
        file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not (api or file):
            return self.answer(404, {"X-Error-Code": "RepoNotFound"})
        name, revision = (api[1], api[3]) if api else (file[1], file[2])
        if name in hub.moved:
            return self.answer(307, {"Location": self.path.replace(name, hub.moved[name])})
        token, repo = self.headers.get("Authorization"), hub.repos.get(name)
        if token not in (None, f"Bearer {TOKEN}"):
            return self.answer(401, {"X-Error-Message": "Invalid credentials in Authorization header"})
        if repo is None or (repo.private and not token):
            return self.answer(404 if token else 401, {"X-Error-Code": "RepoNotFound"})
        if revision not in (None, "main", repo.commit):
            return self.answer(404, {"X-Error-Code": "RevisionNotFound"})
        if api:
            return self.answer(200, {}, json.dumps(self.info(name, repo, tree=api[2] == "tree")).encode())
        if repo.gated and not token:
            return self.answer(401, {"X-Error-Code": "GatedRepo"})
        if file[3] not in repo.files:
            return self.answer(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})
        content = repo.files[file[3]]
        head = {
            "X-Repo-Commit": repo.commit,
            "X-Linked-Etag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{hub.large_files}/{name}/{file[3]}",
        }
        return self.answer(302, head)

    do_HEAD = do_GET

    def info(self, name: str, repo: Repo, tree: bool) -> Any:
        if tree:
            return [{"type": "file", "path": f, "size": len(c), "oid": "0"} for f, c in repo.files.items()]
        siblings = [{"rfilename": f, "size": repo.sizes.get(f, len(c))} for f, c in repo.files.items()]
        return {"id": name, "sha": repo.commit, "siblings": siblings}

    def answer(self, status: int, head: dict[str, str], content: bytes = b"") -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(content))} | head).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def send_file(self, content: bytes) -> None:
        hub, asked = self.of, re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(asked[1]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(content) - first))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        half = first + (len(content) - first) // 2
        self.wfile.write(content[first:half])
        if len(content) > 2**16:
            if hub.cuts:
                hub.cuts -= 1
                self.close_connection = True
                return
            if hub.holds:
                self.wfile.flush()
                for at in range(half, len(content), 2**10):  # slowly, so that it takes longer than any test
                    if hub.holds.wait(0.05):
                        break
                    self.wfile.write(content[at : at + 2**10])
                return
        self.wfile.write(content[half:])
