"""A server that speaks the part of the Hub's HTTP API which pushing and loading a model takes, and keeps all in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "tester"


class Hub(ThreadingHTTPServer):
    """Repositories by id, each a list of commits: message, author's token, files as of then."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, list[dict[str, Any]]] = {}
        self.branches = {"main"}
        """Of all repositories. They share their commits."""
        self.private: set[str] = set()
        """Ids of the repositories that were made private."""
        self.large: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.release = threading.Event()
        """Set at the end: lets go of requests that hang."""
        self.fail: dict[str, list[str]] = {}
        """Beginning of a commit's message to what its next attempts meet: "500", "429", "401", "hang" or "cut"."""

    def commit(self, repository: str, message: str, changes: dict[str, bytes | None], token: str | None) -> str:
        with self.lock:
            commits = self.repositories[repository]
            sha = hashlib.sha1(f"{repository}{len(commits)}".encode()).hexdigest()
            after = {**(commits[-1]["files"] if commits else {}), **changes}
            files = {name: content for name, content in after.items() if content is not None}
            commits.append({"sha": sha, "message": message, "files": files, "token": token})
            return sha


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # a body would wait 40 ms for an answer to its headers

    def do_POST(self) -> None:
        path, body = self._path(), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif path == "/api/repos/create" and (token is None or "wrong" in token):
            self._send(401, b"{}", "application/json", {})
        elif path == "/api/repos/create":
            wanted = json.loads(body)
            repository = f"{wanted.get('organization') or USER}/{wanted['name']}"
            if repository not in self.server.repositories:
                self.server.repositories[repository] = []
                if wanted.get("visibility") == "private":
                    self.server.private.add(repository)
                self.server.commit(repository, "initial commit", {".gitattributes": b""}, token)
            self._json({"url": f"{self.server.url}/{repository}", "name": repository})
        elif match := re.fullmatch(r"/api/models/(.+?)/branch/(.+)", path):
            new = match[2] not in self.server.branches
            self.server.branches.add(match[2])
            self._send(200 if new else 409, b"{}", "application/json", {})
        elif (match := re.fullmatch(r"/api/models/.+?/(?:preupload|commit)/(.+)", path)) and (
            match[1] not in self.server.branches
        ):
            self._missing("RevisionNotFound")
        elif match := re.fullmatch(r"/api/models/(.+?)/preupload/.+", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {f: "lfs" if f.endswith((".safetensors", ".pt", ".pth")) else "regular" for f in files}
            self._json({"files": [{"path": f, "uploadMode": m, "shouldIgnore": False} for f, m in modes.items()]})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            upload = {o["oid"]: {"upload": {"href": f"{self.server.url}/large/{o['oid']}"}} for o in objects}
            self._json({"transfer": "basic", "objects": [{**o, "actions": upload[o["oid"]]} for o in objects]})
        elif match := re.fullmatch(r"/api/models/(.+?)/commit/.+", path):
            lines = [json.loads(line) for line in body.splitlines()]
            message = next(line["value"]["summary"] for line in lines if line["key"] == "header")
            if self._fails(message):
                return
            files = [line["value"] for line in lines if line["key"] == "file"]
            changes: dict[str, bytes | None] = {file["path"]: base64.b64decode(file["content"]) for file in files}
            changes |= {line["value"]["path"]: None for line in lines if line["key"] == "deletedFile"}
            large = [line["value"] for line in lines if line["key"] == "lfsFile"]
            changes |= {file["path"]: self.server.large[file["oid"]] for file in large}
            sha = self.server.commit(match[1], message, changes, token)
            self._json({"commitUrl": f"{self.server.url}/{match[1]}/commit/{sha}", "commitOid": sha, "success": True})
        else:
            self._missing("EntryNotFound")

    def _fails(self, message: str) -> bool:
        fault = next((faults.pop(0) for name, faults in self.server.fail.items() if faults and message == name), None)
        if fault is None:
            return False
        if fault.isdigit():
            self._send(int(fault), b"{}", "application/json", {"Retry-After": "0"} if fault == "429" else {})
        else:
            if fault == "hang":
                self.server.release.wait(60)
            self.close_connection = True
            self.connection.close()
        return True

    def do_PUT(self) -> None:
        content, oid = self.rfile.read(int(self.headers["Content-Length"])), self._path().removeprefix("/large/")
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.large[oid] = content
        self._send(200, b"", "text/plain", {})

    def do_GET(self, body: bool = True) -> None:
        path = self._path()
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/auth-check.*", path):
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            self._send(403 if token.startswith("hf_read") else 200, b"{}", "application/json", {})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            if commit := self._commit(match[1], match[2]):
                files = [{"rfilename": name, "size": len(content)} for name, content in commit["files"].items()]
                self._json({"id": match[1], "modelId": match[1], "sha": commit["sha"], "siblings": files, "tags": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/([^/]+).*", path):
            if commit := self._commit(match[1], match[2]):
                self._json([
                    {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                    for name, content in commit["files"].items()
                ])  # fmt: skip
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            if commit := self._commit(match[1], match[2]):
                content = commit["files"].get(match[3])
                if content is None:
                    self._missing("EntryNotFound", commit["sha"])
                else:
                    etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit["sha"]}
                    self._send(200, content, "application/octet-stream", etag, body)
        else:
            self._missing("EntryNotFound")

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def _commit(self, repository: str, revision: str | None) -> dict[str, Any] | None:
        commits = self.server.repositories.get(repository)
        if not commits:
            self._missing("RepoNotFound")
            return None
        if revision is not None and revision.startswith("refs/") and revision not in self.server.branches:
            self._missing("RevisionNotFound")
            return None
        named = [commit for commit in commits if commit["sha"] == revision]
        return named[0] if named else commits[-1]

    def _missing(self, code: str, sha: str | None = None) -> None:
        self._send(404, b"{}", "application/json", {"X-Error-Code": code} | ({"X-Repo-Commit": sha} if sha else {}))

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), "application/json", {})

    def _send(self, status: int, content: bytes, kind: str, headers: dict[str, str], body: bool = True) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def running_hub() -> Iterator[Hub]:
    """A server on a free port, as long as the ``with`` block lasts."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.release.set()
        hub.shutdown()
        hub.server_close()
        thread.join()
