"""What a load measures is the server's, not the making of connections."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from aura_omni.bench.arrivals import Closed
from aura_omni.bench.client import Client
from aura_omni.bench.work import Speeches


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, object]]

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.asked.append((self.command, self.client_address))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"\0\0")

    do_GET = do_POST = _answer

    def log_message(self, *_: object) -> None: ...


def test_connections_are_there_before_the_first_request():
    handler = type("Handler", (_Handler,), {"asked": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            client = Client(url=f"http://127.0.0.1:{server.server_port}", warm_up=0)
            before: list[int] = []
            work = Speeches(model="m", text="One.")
            client.run(work, Closed(3, 2), number=0, between=lambda: before.append(len(handler.asked)))
        finally:
            server.shutdown()
            thread.join()
    kinds = [kind for kind, _ in handler.asked]
    assert before == [3]
    assert kinds == ["GET"] * 3 + ["POST"] * 6
    assert len({connection for _, connection in handler.asked}) == 3
