import json
import pickle
import unittest
from pathlib import Path

from tallyd import AsyncTallyd, RefusedError, Tallyd, UnconfirmedError
from tallyd.card import Card
from tallyd.counters import bucket_of, number_in, read_of
from tallyd.events import Clock, body_of, checked, routing_key_of

VECTORS = Path(__file__).resolve().parents[3] / "tests" / "vectors"
CARD = Card({"video": 1, "post": 2}, {"like": 1, "view": 2, "unread": 3}, settable=frozenset({"video:unread"}))


def vectors(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


class Vectors(unittest.TestCase):
    def test_events_are_made_and_refused_as_by_the_daemon(self):
        for name, fields in (
            ("events", ["type", "kind", "target_id", "user_id"]),
            ("counts", ["kind", "target_id", "metric", "delta", "event_id"]),
            ("sets", ["type", "kind", "target_id", "metric", "value"]),
        ):
            for vector in vectors(name):
                given = {field: vector["event"][field] for field in fields}
                event = {"type": "count", **given, "at": int(vector["event"]["at"])}
                with self.subTest(event=event):
                    if "refused" in vector:
                        with self.assertRaises(RefusedError) as raised:
                            checked(event, CARD)
                        self.assertEqual(raised.exception.reason, vector["refused"])
                    else:
                        # These clients don't call the scripts, so their events have no `count`.
                        expected = {key: value for key, value in vector["body"].items() if key != "count"}
                        self.assertEqual(json.loads(body_of(checked(event, CARD))), expected)

    def test_buckets_have_the_daemons_names(self):
        for vector in vectors("buckets"):
            card = Card(bucket_bits=vector["bucket_bits"])
            bucket, read = bucket_of(card, vector["kind"], vector["id"]), read_of(card, "tally:", vector["kind"], "like", vector["id"])
            self.assertEqual((read[1], bucket), (vector["key"], vector["missing"]))

    def test_numbers_are_read_as_by_the_daemon(self):
        for vector in vectors("values"):
            with self.subTest(vector=vector):
                card = Card(metrics={"it": vector["place"]}, below_zero=frozenset({"video:it"}))
                number = number_in(card, "video", "it", vector["loaded"], vector["value"])
                self.assertEqual(number, None if vector["number"] is None else int(vector["number"]))


class Events(unittest.TestCase):
    def test_ids_have_one_spelling(self):
        site = Tallyd("amqp://127.0.0.1:1")
        for bad in (0, -1, True, 1.0, 2**63, "042", "", "4 2", "42\n", "٤٢", None, b"42"):
            with self.subTest(bad=bad), self.assertRaises(RefusedError) as raised:
                site.like("video", bad, 7)
            self.assertEqual(raised.exception.reason, "target-id-out-of-range")
            with self.assertRaises(RefusedError) as raised:
                site.unlike("video", 42, bad)
            self.assertEqual(raised.exception.reason, "user-id-out-of-range")

    def test_what_json_can_not_say_is_refused(self):
        site = Tallyd("amqp://127.0.0.1:1")
        for call, reason in (
            (lambda: site.count("video", 42, "view", 1.0), "delta-out-of-range"),
            (lambda: site.count("video", 42, "view", True), "delta-out-of-range"),
            (lambda: site.count("video", 42, "view", event_id="\ud800"), "event-id-out-of-range"),
            (lambda: site.count("video", 42, "view", event_id="ä" * 65), "event-id-out-of-range"),
            (lambda: site.count("video", 42, "like"), "unknown-metric"),
            (lambda: site.set("video", 42, "unread", 2**53 + 1), "value-out-of-range"),
            (lambda: site.like("\ud800", 42, 7), "unknown-kind"),
            (lambda: site.like("video", 42, 7, at=1.5), "at-out-of-range"),
            (lambda: site.publish({"type": "like", "kind": "video", "target_id": 1, "user_id": 1}), "at-out-of-range"),
        ):
            with self.assertRaises(RefusedError) as raised:
                call()
            self.assertEqual(raised.exception.reason, reason)

    def test_a_missing_server_is_said_before_anything_is_sent(self):
        with self.assertRaisesRegex(ValueError, "amqp_url"):
            Tallyd().like("video", 1, 1)
        with self.assertRaisesRegex(ValueError, "redis_url or gateway"):
            Tallyd().counts("video", [1])
        with self.assertRaisesRegex(ValueError, "gateway=URL"):
            Tallyd().liked("video", [1], 1)
        for settings in ({"deadline_s": 0}, {"gateway": "127.0.0.1:9191"}):
            with self.assertRaises(ValueError):
                Tallyd(**settings)
        self.assertEqual(Tallyd().counts("video", []), {})

    def test_the_routing_key_follows_the_setting(self):
        like = {"type": "like", "target_id": "42", "user_id": "7"}
        self.assertEqual([routing_key_of(like, by) for by in ("user", "target")], ["7", "42"])
        self.assertEqual(routing_key_of({"type": "count", "target_id": "42"}, "user"), "42")

    def test_errors_can_be_stored_with_their_event(self):
        error = pickle.loads(pickle.dumps(UnconfirmedError("late", {"type": "like"})))
        self.assertEqual((type(error), str(error), error.event), (UnconfirmedError, "late", {"type": "like"}))

    def test_both_classes_have_the_same_methods(self):
        names = [{name for name in dir(site) if not name.startswith("_")} for site in (Tallyd, AsyncTallyd)]
        self.assertEqual(*names)


class Time(unittest.TestCase):
    def test_no_two_clicks_have_the_same_instant(self):
        times = iter([5_000_000, 5_000_000, 4_999_000, 6_000_000, 1_000_000])
        clock = Clock(lambda: next(times))
        # Before the fifth click, the clock is set back by five seconds. The fifth click gets the new time.
        self.assertEqual([clock.at() for _ in range(5)], [5_000_000, 5_000_001, 5_000_002, 6_000_000, 1_000_000])


if __name__ == "__main__":
    unittest.main()
