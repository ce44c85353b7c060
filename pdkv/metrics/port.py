"""The port where metrics are asked for.

Guarantees: `AT_ONCE` callers are served at once and whoever comes beside them is hung up on; one that says nothing for
`SILENT_S` is hung up on as well, so that nobody makes a serving process start threads without end.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger(__name__)
AT_ONCE = 16
SILENT_S = 10.0


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, *given: Any, **named: Any) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)
        super().__init__(*given, **named)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            log.debug("%s is hung up on: %d others are asking", client_address, AT_ONCE)
            return self.shutdown_request(request)
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started: nobody else gives the place back
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("what %s asked came to nothing", client_address, exc_info=True)


class _ServerOver6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SILENT_S

    def log_message(self, format: str, *values: Any) -> None:
        """A line a scrape is no news."""


@contextmanager
def serving(registry: CollectorRegistry, host: str, port: int) -> Iterator[int]:
    """As long as the body runs; yields the port. Raises `OSError` if the address can't be had."""
    server_class = _ServerOver6 if ":" in host else _Server
    server = make_server(host, port, make_wsgi_app(registry), server_class, _Handler)
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
