import asyncio
import json
import pickle
import socket
import threading
import time
import unittest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tallyd import AsyncTallyd, LimitedError, PublishManyError, RefusedError, RejectedError, Tallyd, UnconfirmedError
from tallyd.card import Card
from tallyd.errors import NackedError
from tallyd.sender import ToRabbitmq

LIKE = {"type": "like", "kind": "video", "target_id": "42", "user_id": "7", "at": 5}
COUNT = {"type": "count", "kind": "video", "target_id": "42", "metric": "share", "delta": 1, "event_id": "e", "at": 6}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ends = False

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
        self.close_connection = self.close_connection or self.ends


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
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.posted, self.server.traces, self.server.answers = [], [], [confirmed]
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)

    def site(self, **settings):
        site = Tallyd(gateway=self.url, **settings)
        self.addCleanup(site.close)
        return site


class Sending(WithGateway):
    def test_the_client_asks_for_the_trace_at_each_publish(self):
        traces = iter(("trace-1", "trace-2", None))
        site = self.site(traceparent=lambda: next(traces))
        site.like("video", 42, 7)
        site.publish_many([LIKE, COUNT])
        site.publish(LIKE)
        self.assertEqual(self.server.traces, ["trace-1", "trace-2", None])

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

    def test_results_keep_the_order_of_the_list(self):
        class Broker:
            async def publish(self, event, exchange, routing_key, body, ends_at, traceparent):
                if event["target_id"] == "43":
                    raise NackedError("full", event)

        events = [{**COUNT, "target_id": "43"}, LIKE, COUNT]
        nacked, *others = asyncio.run(ToRabbitmq(Broker()).publish(events, Card(), 0, None))
        self.assertEqual((type(nacked), nacked.event, others), (NackedError, events[0], [LIKE, COUNT]))


class Closing(unittest.TestCase):
    def test_closing_ends_the_calls_of_other_threads(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            site = Tallyd(f"amqp://{address}", f"redis://{address}", deadline_s=60)
            errors = []

            def call(method, *arguments):
                try:
                    method(*arguments)
                except Exception as error:
                    errors.append(error)

            threads = [threading.Thread(target=call, args=(site.like, "video", 42, 7)), threading.Thread(target=call, args=(site.counts, "video", [1]))]
            for thread in threads:
                thread.start()
            time.sleep(0.7)
            began = time.monotonic()
            site.close()
            for thread in threads:
                thread.join(10)
            self.assertLess(time.monotonic() - began, 5)
            (error,) = errors
            self.assertEqual((type(error), error.event["user_id"]), (UnconfirmedError, "7"))
            with self.assertRaisesRegex(RuntimeError, "closed"):
                site.like("video", 42, 7)


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


if __name__ == "__main__":
    unittest.main()
