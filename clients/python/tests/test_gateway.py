import asyncio
import json
import os
import pickle
import socketserver
import tempfile
import threading
import time
import unittest
from contextvars import ContextVar
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tallyd import AsyncTallyd, GatewayError, LimitedError, PublishManyError, ReadError, RefusedError, RejectedError, Tallyd, UnconfirmedError

LIKE = {"type": "like", "kind": "video", "target_id": "42", "user_id": "7", "at": 1795251385000005}
COUNT = {"type": "count", "kind": "video", "target_id": "42", "metric": "share", "delta": 1, "event_id": "e", "at": 1795251385000006}


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
        self.reply(*self.server.answer(url.path, asked))

    def do_POST(self):
        events = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append(events)
        self.server.traces.append(self.headers["traceparent"])
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
        else:
            self.reply(*answer(events))

    def reply(self, status, answer):
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


def confirmed(events):
    return 202, {"events": [{"verdict": "confirmed", "at": event["at"]} for event in events]}


def unconfirmed(events):
    return 503, {"events": [{"verdict": "unconfirmed", "at": event["at"], "message": "the broker is unreachable"} for event in events]}


def busy(_):
    return 503, {"error": {"code": "busy", "message": "try again"}}


def unauthorized(_):
    return 401, {"error": {"code": "unauthorized", "message": "send the token"}}


class WithGateway(unittest.TestCase):
    def setUp(self):
        self.start(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def start(self, server):
        server.daemon_threads = True
        server.asked, server.connections, server.answer = [], 0, answer
        server.posted, server.traces, server.answers = [], [], [confirmed]
        self.server = server
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)

    def site(self, **settings):
        site = Tallyd(gateway=self.url, **settings)
        self.addCleanup(site.close)
        return site


class Reading(WithGateway):
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


class Publishing(WithGateway):
    def test_the_client_asks_for_the_trace_at_each_publish(self):
        trace = ContextVar("trace")
        site = self.site(traceparent=trace.get)
        first, second = [f"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b{number}-01" for number in (1, 2)]
        trace.set(first)
        site.like("video", 42, 7)
        trace.set(second)
        site.publish_many([LIKE, COUNT])
        for nothing in (None, "trace-1"):
            trace.set(nothing)
            site.publish(LIKE)
        self.assertEqual(self.server.traces, [first, second, None, None])

    def test_what_the_gateway_has_not_confirmed_is_sent_again(self):
        self.server.answers = [busy, unconfirmed, confirmed]
        self.assertEqual(self.site().publish_many([LIKE, COUNT]), [LIKE, COUNT])
        self.assertEqual(self.server.posted, [[LIKE, COUNT]] * 3)
        self.server.answers = [unconfirmed]
        with self.assertRaisesRegex(UnconfirmedError, "the broker is unreachable") as raised:
            self.site(deadline_s=0.3).publish(LIKE)
        self.assertEqual(raised.exception.event, LIKE)

    def test_what_the_gateway_may_have_published_is_not_sent_again(self):
        site = self.site()
        site.publish(LIKE)
        self.server.answers = [None, confirmed]
        with self.assertRaisesRegex(UnconfirmedError, "no answer") as raised:
            site.publish(COUNT)
        self.assertEqual((raised.exception.event, self.server.posted), (COUNT, [[LIKE], [COUNT]]))

    def test_closing_leaves_the_request_in_flight_its_answer(self):
        async def publish():
            site, loop = AsyncTallyd(gateway=self.url), asyncio.get_running_loop()

            def close_and_confirm(events):
                asyncio.run_coroutine_threadsafe(site.close(), loop).result()
                return confirmed(events)

            self.server.answers = [close_and_confirm]
            return await site.publish(LIKE)

        self.assertEqual(asyncio.run(publish()), LIKE)

    def test_a_connection_that_the_gateway_closed_is_not_used(self):
        site = self.site()
        Handler.ends = True
        self.addCleanup(setattr, Handler, "ends", False)
        for _ in range(3):
            site.publish(COUNT)
            time.sleep(0.05)
        self.assertEqual(len(self.server.posted), 3)

    def test_an_unreachable_gateway_is_asked_until_the_deadline(self):
        with Tallyd(gateway="http://127.0.0.1:1", deadline_s=0.3) as site, self.assertRaisesRegex(UnconfirmedError, "no connection"):
            site.publish(LIKE)

    def test_a_wrong_request_is_not_tried_again(self):
        self.server.answers = [unauthorized]
        with self.assertRaisesRegex(RejectedError, r"401 \(unauthorized\)") as raised:
            self.site().publish(LIKE)
        self.assertEqual((raised.exception.event, len(self.server.posted)), (LIKE, 1))


class Many(WithGateway):
    def judge(self, events):
        verdicts = [
            {"verdict": "confirmed", "at": 1795251385000005},
            {"verdict": "refused", "reason": "unknown-kind", "message": "kind is song"},
            {"verdict": "limited", "wait_ms": 1_500},
        ]
        return 400, {"events": verdicts}

    def test_a_list_that_is_not_whole_says_the_fate_of_each_event(self):
        self.server.answers = [self.judge]
        events = [LIKE, {**LIKE, "kind": "song"}, {**LIKE, "user_id": "8"}]
        with Tallyd(gateway=self.url) as site, self.assertRaises(PublishManyError) as raised:
            site.publish_many(events)
        for error in (raised.exception, pickle.loads(pickle.dumps(raised.exception))):
            self.assertEqual(error.results[0], LIKE)
            refused, limited = error.results[1:]
            self.assertEqual((type(refused), refused.reason), (RefusedError, "unknown-kind"))
            self.assertEqual((type(limited), limited.wait_s), (LimitedError, 1.5))
            self.assertEqual(error.events, [events[2]])
            self.assertIn("2 of 3 events were not confirmed (RefusedError 1, LimitedError 1)", str(error))

    def test_new_events_get_what_they_lack(self):
        like, count = ({key: value for key, value in event.items() if key not in ("at", "event_id")} for event in (LIKE, COUNT))

        async def both():
            async with AsyncTallyd(gateway=self.url) as site:
                return await site.publish_many(event for event in (like, count)), await site.publish_many([])

        self.assertEqual([len(events) for events in asyncio.run(both())], [2, 0])
        (posted,) = self.server.posted
        self.assertLess(posted[0]["at"], posted[1]["at"])
        self.assertEqual(len(posted[1]["event_id"]), 36)

    def test_one_event_that_is_refused_keeps_the_list_from_being_sent(self):
        with Tallyd(gateway=self.url) as site, self.assertRaisesRegex(RefusedError, "event 1 of the list") as raised:
            site.publish_many([LIKE, {**LIKE, "target_id": 0}])
        self.assertEqual((raised.exception.reason, self.server.posted), ("target-id-out-of-range", []))

    def test_a_long_list_is_several_requests(self):
        with Tallyd(gateway=self.url) as site:
            self.assertEqual(len(site.publish_many([LIKE] * 1_001)), 1_001)
        self.assertEqual([len(events) for events in self.server.posted], [1_000, 1])


if __name__ == "__main__":
    unittest.main()
