import asyncio
import json
import pickle
import threading
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tallyd import AsyncTallyd, LimitedError, PublishManyError, RefusedError, RejectedError, Tallyd, UnconfirmedError, writers
from tallyd.errors import NackedError
from tallyd.gateway import Gateway
from tallyd.sender import Sender
from tallyd.writers import Announced, Writers, announced

LIKE = {"type": "like", "kind": "video", "target_id": "42", "user_id": "7", "at": 5}
COUNT = {"type": "count", "kind": "video", "target_id": "42", "metric": "share", "delta": 1, "event_id": "e", "at": 6}
BY_API = frozenset({"video:like", "video:share"})


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        events = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.posted.append(events)
        self.server.traces.append(self.headers["traceparent"])
        answers = self.server.answers
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            self.close_connection = True
            return
        status, answer = answer(events)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def confirmed(events):
    return 202, {"events": [{"verdict": "confirmed", "at": 1_000 + event["at"], "changed": True, "count": 1} for event in events]}


def unconfirmed(events):
    return 503, {"events": [{"verdict": "unconfirmed", "at": event["at"], "message": "the broker is unreachable"} for event in events]}


def busy(_):
    return 503, {"error": {"code": "busy", "message": "try again"}}


def unauthorized(_):
    return 401, {"error": {"code": "unauthorized", "message": "send the token"}}


class Broker:
    """A fake RabbitMQ."""

    def __init__(self):
        self.events = []
        self.nacks = ()
        self.traces = []

    async def publish(self, event, routing_key, body, ends_at, traceparent):
        self.traces.append(traceparent)
        assert json.loads(body) == event
        if event["target_id"] in self.nacks:
            raise NackedError("full", event)
        self.events.append((routing_key, event))

    async def close(self):
        pass


class FakeWriters:
    """A fake announcement in Redis."""

    async def by_api(self):
        return BY_API

    def close(self):
        pass


class WithGateway(unittest.TestCase):
    def setUp(self):
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.posted, self.server.traces, self.server.answers = [], [], [confirmed]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def send(self, events, broker=None, url=None, times=1, deadline_s=5.0, traceparent=None):
        """The results of the last call."""

        async def run():
            gateway = Gateway(url, None, 1.0) if url else None
            sender = Sender(broker, gateway, FakeWriters(), "user", deadline_s)
            try:
                for _ in range(times):
                    results = await sender.publish(events, traceparent)
                return results
            finally:
                await sender.close()
                if gateway:
                    gateway.close()

        return asyncio.run(run())


class Sending(WithGateway):
    def test_the_gateway_gets_what_api_servers_count(self):
        broker, view = Broker(), {**COUNT, "metric": "view"}
        results = self.send([LIKE, view, COUNT], broker, self.url)
        self.assertEqual(results, [{**LIKE, "at": 1_005}, view, {**COUNT, "at": 1_006}])
        self.assertEqual(self.server.posted, [[LIKE, COUNT]])
        self.assertEqual(broker.events, [("42", view)])

    def test_both_ways_name_the_trace_of_the_call(self):
        broker, view = Broker(), {**COUNT, "metric": "view"}
        for traceparent in ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None):
            self.send([LIKE, view], broker, self.url, traceparent=traceparent)
            self.assertEqual([self.server.traces.pop(), broker.traces.pop()], [traceparent, traceparent])

    def test_the_client_asks_for_the_trace_at_each_publish(self):
        traces = iter(("trace-1", "trace-2"))
        with Tallyd(gateway=self.url, traceparent=lambda: next(traces)) as site:
            site.like("video", 42, 7)
            site.publish_many([LIKE, COUNT])
        self.assertEqual(self.server.traces, ["trace-1", "trace-2"])

    def test_without_a_gateway_each_number_is_warned_of_once(self):
        broker = Broker()
        with self.assertLogs("tallyd", "WARNING") as logs:
            self.send([LIKE, LIKE, COUNT], broker, times=2)
        self.assertEqual([number in line for number, line in zip(("video:like", "video:share"), logs.output)], [True, True])
        self.assertEqual((len(logs.output), len(broker.events)), (2, 6))

    def test_retries_have_the_same_event(self):
        self.server.answers = [busy, unconfirmed, confirmed]
        self.assertEqual(self.send([LIKE, COUNT], Broker(), self.url), [{**LIKE, "at": 1_005}, {**COUNT, "at": 1_006}])
        self.assertEqual(self.server.posted, [[LIKE, COUNT]] * 3)

    def test_without_an_answer_rabbitmq_gets_the_same_events(self):
        self.server.answers = [None]
        broker = Broker()
        with self.assertLogs("tallyd", "WARNING") as logs:
            results = self.send([LIKE, COUNT], broker, self.url, times=2, deadline_s=2)
        self.assertEqual(results, [LIKE, COUNT])
        self.assertEqual(broker.events, [("7", LIKE), ("42", COUNT)] * 2)
        # The gateway could count the event twice.
        self.assertEqual([events for events in self.server.posted if COUNT in events], [[LIKE, COUNT]] * 2)
        self.assertIn([LIKE], self.server.posted)
        self.assertEqual(len(logs.output), 1)

    def test_a_gateway_alone_is_asked_until_the_deadline(self):
        self.server.answers = [None, None, confirmed]
        self.assertEqual(self.send([COUNT], None, self.url), [{**COUNT, "at": 1_006}])
        self.server.answers = [unconfirmed]
        (late,) = self.send([LIKE], None, self.url, deadline_s=0.3)
        self.assertEqual((type(late), late.event), (UnconfirmedError, LIKE))
        self.assertIn("the broker is unreachable", str(late))
        (late,) = self.send([LIKE], None, "http://127.0.0.1:1", deadline_s=0.3)
        self.assertIsInstance(late, UnconfirmedError)

    def test_a_wrong_request_is_not_tried_again(self):
        self.server.answers = [unauthorized]
        broker = Broker()
        (rejected,) = self.send([LIKE], broker, self.url)
        self.assertEqual((type(rejected), rejected.event), (RejectedError, LIKE))
        self.assertIn("401 (unauthorized)", str(rejected))
        self.assertEqual((len(self.server.posted), broker.events), (1, []))


class Many(WithGateway):
    def judge(self, events):
        verdicts = [
            {"verdict": "confirmed", "at": 5},
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

    def test_results_keep_the_order_of_the_list(self):
        broker, view = Broker(), {**COUNT, "metric": "view"}
        broker.nacks = ("43",)
        events = [{**view, "target_id": "43"}, LIKE, view]
        nacked, like, last = self.send(events, broker, self.url)
        self.assertEqual((type(nacked), nacked.event, like["user_id"], last), (NackedError, events[0], "7", view))


class Following(unittest.TestCase):
    def test_whatever_is_no_announcement_changes_nothing(self):
        known = Announced(BY_API)
        self.assertEqual(announced(b'{"api": ["video:like"], "later": 1}', Announced()), Announced(frozenset({"video:like"})))
        self.assertEqual(announced('{"api": []}', known), Announced())
        for text in (None, b"null", b"[]", b"{}", b'{"api": 1}'):
            self.assertEqual(announced(text, known), known)

    def test_all_clients_change_at_the_announced_instant(self):
        change = announced('{"api": [], "next": ["video:like"], "from": 1795251396004538}', Announced(BY_API))
        self.assertEqual(change.at(1795251396004537), frozenset())
        self.assertEqual(change.at(1795251396004538), {"video:like"})

    def test_one_call_in_ten_seconds_asks_and_the_others_do_not_wait(self):
        class Slow(Writers):
            asked, text = 0, b'{"api": ["video:like"]}'

            async def _text(self):
                self.asked += 1
                await self.free.wait()
                return self.text

        async def run():
            slow = Slow("redis://127.0.0.1:1", "tally:c:writers")
            slow.free = asyncio.Event()
            first = [asyncio.ensure_future(slow.by_api()) for _ in range(3)]
            await asyncio.sleep(0)
            # Before the first answer, the client does not know which program counts.
            self.assertFalse(any(call.done() for call in first))
            slow.free.set()
            self.assertEqual(await asyncio.gather(*first), [{"video:like"}] * 3)
            self.assertEqual((await slow.by_api(), slow.asked), ({"video:like"}, 1))
            slow.free.clear()
            slow._due_at, slow.text = 0.0, b'{"api": []}'
            asking = asyncio.ensure_future(slow.by_api())
            while slow.asked < 2:
                await asyncio.sleep(0)
            self.assertEqual(await slow.by_api(), {"video:like"})
            self.assertFalse(asking.done())
            slow.free.set()
            self.assertEqual((await asking, await slow.by_api(), slow.asked), (frozenset(), frozenset(), 2))

        asyncio.run(run())

    def test_a_redis_that_is_away_or_silent_changes_nothing(self):
        async def silent(reader, writer):
            await reader.read()
            writer.close()

        async def run():
            server = await asyncio.start_server(silent, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            for url in (f"redis://127.0.0.1:{port}", "redis://127.0.0.1:1"):
                away = Writers(url, "tally:c:writers")
                away._known = Announced(BY_API)
                began = asyncio.get_running_loop().time()
                self.assertEqual(await away.by_api(), BY_API)
                self.assertLess(asyncio.get_running_loop().time() - began, 10 * writers.READ_MAX_S)
                self.assertGreater(away._due_at, began + 9)
            server.close()

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
