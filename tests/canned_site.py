"""A site process that answers commands as it is told: for what the command line makes of an answer, where no site has to work."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from socketserver import UnixStreamServer
from typing import Any

from service.settings import Settings


class CannedSite:
    """`answers` holds what each command is answered; `asked` what came."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.answers: dict[str, dict[str, Any]] = {}
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def refuse(self, call: str, code: str) -> None:
        self.answers[call] = {"error": {"code": code, "message": "It was refused.", "fix": "Do otherwise."}}

    def answer(self, call: str, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((call, request))
        return self.answers[call]


@contextmanager
def canned_site(settings: Settings) -> Iterator[CannedSite]:
    site = CannedSite(settings)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            body = json.dumps(site.answer(self.path.removeprefix("/"), request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    settings.run_dir.mkdir(parents=True, exist_ok=True)
    with UnixStreamServer(str(settings.admin_socket), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield site
        finally:
            server.shutdown()
            thread.join()
