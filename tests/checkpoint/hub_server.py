"""A folder as a model of the hub, served to this machine alone: as much of the hub's interface as downloads use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves `folder` as the model someone/tiny.

    Attributes:
        most: bytes of one file that it sends before the connection breaks; None for no limit.
        dies: whether it answers nothing any more once it has broken a connection.
        sent: by file, of each answer the first byte and how many were sent.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.most, self.dies, self.is_dead = folder, None, False, False
        self.sent: dict[str, list[tuple[int, int]]] = {}

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        if self.server.is_dead:
            self.close_connection = True
            return
        self._file(with_data=False)

    def do_GET(self) -> None:
        if self.server.is_dead:
            self.close_connection = True
            return
        files = sorted(path for path in self.server.folder.iterdir())
        if "/resolve/" in self.path:
            self._file(with_data=True)
        elif "/tree/" in self.path:
            entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": _oid(f)} for f in files]
            self._json(entries)
        else:
            self._json({"id": "someone/tiny", "sha": COMMIT, "siblings": [{"rfilename": f.name} for f in files]})

    def _json(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _file(self, with_data: bool) -> None:
        file = self.server.folder / self.path.split("?")[0].rpartition("/")[2]
        if not file.is_file():
            self.send_error(404)
            return
        data, first = file.read_bytes(), 0
        if (wanted := self.headers.get("Range")) and with_data:
            first = int(wanted.removeprefix("bytes=").split("-")[0])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("ETag", f'"{_oid(file)}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        if not with_data:
            return
        rest = data[first:]
        if self.server.most is not None and len(rest) > self.server.most:
            rest = rest[: self.server.most]
            self.close_connection, self.server.is_dead = True, self.server.dies
        self.server.sent.setdefault(file.name, []).append((first, len(rest)))
        self.wfile.write(rest)

    def log_message(self, *arguments) -> None:
        pass


def _oid(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Hub]:
    with Hub(folder) as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
