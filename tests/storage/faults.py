"""A proxy before the local S3 server that fails as networks do: errors, lost answers, delays, old listings."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import urlparse


class Request(NamedTuple):
    """A request that the proxy received: its number, method, path, and whether it is a conditional write."""

    number: int
    method: str
    path: str
    is_conditional: bool


Fault = Callable[[Request], str]
"""Returns what happens to a request: "" nothing, "refused" status 503 before it is done, "lost" status 503 after it is
done, "slow" an answer after a second, "stale" the first answer that this path had."""


@contextmanager
def failing(endpoint: str, fault: Fault) -> Iterator[str]:
    """Run a proxy before a server, and yield its address."""
    server, count, guard, first = urlparse(endpoint), iter(range(10**9)), threading.Lock(), dict[str, tuple]()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with guard:
                number = next(count)
            conditional = bool({"if-match", "if-none-match"} & {name.lower() for name in self.headers})
            what = fault(Request(number, self.command, self.path, conditional and self.command == "PUT"))
            if what == "refused":
                return self.answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            if what == "slow":
                time.sleep(1.0)
            inner = http.client.HTTPConnection(server.hostname, server.port, timeout=60)
            inner.request(self.command, self.path, body, dict(self.headers))
            got = inner.getresponse()
            found = got.status, got.getheaders(), got.read()
            inner.close()
            if what == "lost":
                return self.answer(503, [], b"<Error><Code>InternalError</Code></Error>")
            if what == "stale":
                found = first.setdefault(self.path, found)
            return self.answer(*found)

        def answer(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            if self.command == "HEAD":
                length = next((value for name, value in headers if name.lower() == "content-length"), "0")
                self.send_header("Content-Length", length)
                self.end_headers()
            else:
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

        def log_message(self, *_: object) -> None:
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{proxy.server_port}"
    finally:
        proxy.shutdown()
        proxy.server_close()
