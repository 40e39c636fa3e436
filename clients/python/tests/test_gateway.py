import asyncio
import json
import os
import socketserver
import tempfile
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tallyd import AsyncTallyd, GatewayError, ReadError, Tallyd


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ends = False

    def address_string(self):
        return "client"

    def log_message(self, *_):
        pass

    def setup(self):
        self.server.connections += 1
        super().setup()

    def do_GET(self):
        url = urlsplit(self.path)
        asked = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.server.asked.append((url.path, asked, self.headers["Authorization"]))
        status, answer = self.server.answer(url.path, asked)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        # Close the connection without the header "Connection: close". A real server does the same when it
        # closes an idle connection.
        self.close_connection = self.close_connection or self.ends


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


def answer(path, asked):
    if path == "/v1/counters":
        if asked["kind"] == "song":
            return 400, {"error": {"code": "unknown-kind", "message": "kind is song"}}
        known = {"1": 12, "2": 3}
        ids = asked["ids"].split(",")
        return 200, {"kind": "video", "counters": [{"id": id, "source": "redis", asked["metrics"]: known.get(id)} for id in ids]}
    if path == "/v1/likes":
        return 200, {"likes": [{"id": id, "liked": id == asked["user"]} for id in asked["ids"].split(",")]}
    if path == "/v1/boards/top%2Fall":
        return 200, {"board": "top/all", "members": []}
    return 500, "no object"


class Gateway(unittest.TestCase):
    def setUp(self):
        self.start(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def start(self, server):
        server.daemon_threads = True
        server.asked, server.connections, server.answer = [], 0, answer
        self.server = server
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)

    def test_numbers_come_by_the_ids_as_they_were_given(self):
        with Tallyd(gateway=self.url, token="secret") as site:
            self.assertEqual(site.counts("video", [1, "2", 3]), {1: 12, "2": 3, 3: None})
            self.assertEqual(site.counts("video", [1], "view"), {1: 12})
            self.assertEqual(site.liked("video", [7, 8], 7), {7: True, 8: False})
            self.assertEqual(site.board("top/all", "2026-W48", around=42, radius=5)["members"], [])
        self.assertEqual({authorization for _, _, authorization in self.server.asked}, {"Bearer secret"})
        self.assertEqual(self.server.asked[-1][1], {"period": "2026-W48", "top": "100", "around": "42", "radius": "5"})
        self.assertEqual(self.server.connections, 1)

    def test_many_ids_are_several_requests(self):
        with Tallyd(gateway=f"{self.url}/") as site:
            self.assertEqual(len(site.counts("video", range(1, 1_002))), 1_001)
        self.assertEqual([len(asked["ids"].split(",")) for _, asked, _ in self.server.asked], [500, 500, 1])

    def test_an_error_has_the_gateways_code(self):
        with Tallyd(gateway=self.url) as site:
            with self.assertRaises(GatewayError) as raised:
                site.counts("song", [1])
            self.assertEqual((raised.exception.status, raised.exception.code), (400, "unknown-kind"))
            with self.assertRaisesRegex(GatewayError, "500"):
                site.board("nothing")

    def test_an_idle_connection_that_was_closed_is_replaced(self):
        Handler.ends = True
        self.addCleanup(setattr, Handler, "ends", False)
        with Tallyd(gateway=self.url) as site:
            for _ in range(3):
                self.assertEqual(site.counts("video", [1]), {1: 12})
        self.assertEqual(self.server.connections, 3)

    def test_a_fork_leaves_the_connections_of_its_parent_alone(self):
        with Tallyd(gateway=self.url) as site:
            site.counts("video", [1])
            child = os.fork()
            if child == 0:
                os._exit(0 if site.counts("video", [2]) == {2: 3} else 1)
            self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
            self.assertEqual(site.counts("video", [1]), {1: 12})
        self.assertEqual(self.server.connections, 2)

    def test_a_gateway_that_does_not_answer_makes_no_number(self):
        with Tallyd(gateway="http://127.0.0.1:1") as site, self.assertRaisesRegex(ReadError, "unknown"):
            site.counts("video", [1])

    def test_the_class_for_asyncio_reads_the_same(self):
        async def read():
            async with AsyncTallyd(gateway=self.url) as site:
                numbers = await site.counts("video", [1, 3])
                return numbers, await site.liked("video", [7], "7"), await site.board("top/all")

        self.assertEqual(asyncio.run(read()), ({1: 12, 3: None}, {7: True}, {"board": "top/all", "members": []}))

    def test_a_unix_socket_works_like_an_address(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "gateway.sock"
            self.start(UnixServer(str(path), Handler))
            with Tallyd(gateway=f"unix://{path}") as site:
                self.assertEqual(site.counts("video", [2]), {2: 3})


if __name__ == "__main__":
    unittest.main()
