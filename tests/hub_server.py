"""A Hugging Face hub of one dataset on the loopback: what fsspec's `hf://` asks, in one page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit


class _Hub(BaseHTTPRequestHandler):
    files: dict[str, bytes]
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Nothing: a test is silent."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        length = headers.pop("length", str(len(body)))
        for name, value in ({"Content-Length": length} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._answer(status, json.dumps(value).encode(), Content_Type="application/json")

    def _entry(self, name: str) -> dict[str, Any]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": _oid(data)}

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/datasets/o/r/resolve/[^/]+/(.+)", path):
            data = self.files.get(found[1])
            if data is None:
                self._answer(404, X_Error_Code="EntryNotFound")
            else:
                tags = {"ETag": f'"{_oid(data)}"', "X_Repo_Commit": "0" * 40}
                self._answer(200, data, **tags)
        elif found := re.fullmatch(r"/api/datasets/o/r/tree/[^/]+/?(.*)", path):
            below = f"{found[1]}/" if found[1] else ""
            names = sorted(name for name in self.files if name.startswith(below))
            folders = {
                name[:i] for name in names for i in range(len(below), len(name)) if name[i] == "/"
            }
            tree = [{"type": "directory", "path": one, "oid": "0" * 40} for one in sorted(folders)]
            self._json(tree + [self._entry(name) for name in names])
        elif re.fullmatch(r"/api/datasets/o/r(/revision/.+)?", path):
            self._json({"id": "o/r", "sha": "0" * 40, "siblings": [], "tags": []})
        else:
            self._answer(404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if "/preupload/" in path:
            names = [one["path"] for one in json.loads(body)["files"]]
            modes = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
            self._json({"files": modes})
        elif "/commit/" in path:
            for line in body.splitlines():
                one = json.loads(line)
                if one["key"] == "file":
                    self.files[one["value"]["path"]] = base64.b64decode(one["value"]["content"])
            url = f"http://{self.headers['Host']}/datasets/o/r/commit/{'0' * 40}"
            self._json({"success": True, "commitOid": "0" * 40, "commitUrl": url})
        elif "/paths-info/" in path:
            if body.startswith(b"{"):
                wanted = json.loads(body)["paths"]
            else:
                wanted = re.findall(r"paths=([^&]+)", unquote(body.decode()))
            self._json([self._entry(name) for name in wanted if name in self.files])
        else:
            self._answer(404)


def _oid(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


@contextmanager
def hub_server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """Its address, and the files of the dataset o/r."""
    files: dict[str, bytes] = {}
    handler = type("Hub", (_Hub,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", files
    finally:
        server.shutdown()
        server.server_close()
