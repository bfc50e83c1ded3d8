"""A hub of data sets on this machine: what huggingface_hub asks of one, answered from folders."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """Data sets by their names, each a folder of files; a change of one is a new revision."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.folders: dict[str, Path] = {}
        self.asked: list[str] = []
        """The files that were downloaded."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Return what lets a process use this hub and a cache of its own."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HUB_CACHE": str(cache),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }

    def files(self, name: str) -> dict[str, bytes]:
        """Return a data set's files."""
        folder = self.folders[name]
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        return {str(path.relative_to(folder)): path.read_bytes() for path in paths}

    def revision(self, name: str) -> str:
        """Return the commit of a data set's content."""
        hasher = hashlib.sha1(usedforsecurity=False)
        for file, content in self.files(name).items():
            hasher.update(f"{file}\0{len(content)}\0".encode() + content)
        return hasher.hexdigest()


def _answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body for a path."""
    parts = [unquote(part) for part in path.strip("/").split("/")]
    api = parts[:2] == ["api", "datasets"]
    name = "/".join(parts[2:4] if api else parts[1:3])
    if name not in hub.folders or not (api or parts[:1] == ["datasets"]):
        return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
    files, commit = hub.files(name), hub.revision(name)
    wanted, rest = (parts[4:6], parts[6:]) if api else (parts[3:5], parts[5:])
    if wanted and wanted[1] not in ("main", commit):
        return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
    if wanted[:1] == ["tree"]:
        tree = [
            {"type": "file", "path": file, "size": len(content), "oid": _oid(content)}
            for file, content in files.items()
        ]
        return 200, {}, json.dumps(tree).encode()
    if wanted[:1] == ["resolve"] and (file := "/".join(rest)) in files:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(files[file])}"'}
        return 200, headers, files[file]
    if api:
        siblings = [{"rfilename": file} for file in files]
        found = {"id": name, "sha": commit, "private": False, "siblings": siblings}
        return 200, {}, json.dumps(found).encode()
    return 404, {"X-Error-Code": "EntryNotFound"}, b"{}"


def _oid(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def running_hub() -> Generator[Hub]:
    """Serve a hub while the context is open."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._send(body=False)

        def do_GET(self) -> None:
            self._send(body=True)

        def _send(self, *, body: bool) -> None:
            path = urlsplit(self.path).path
            status, headers, content = _answer(hub, path)
            if body and status == 200 and "/resolve/" in path:
                hub.asked.append(path.partition("/resolve/")[2].partition("/")[2])
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub = Hub(server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
