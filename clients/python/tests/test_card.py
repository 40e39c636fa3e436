import asyncio
import json
import logging
import socket
import threading
import time
import unittest

from redis.exceptions import ResponseError

from tallyd import AsyncTallyd, NackedError, ReadError, RefusedError, Tallyd, UnconfirmedError
from tallyd.card import Card, parsed
from tallyd.reader import CARD_READ_MAX_S
from tallyd.sender import ToRabbitmq

# Tests look for warnings with assertLogs.
logging.getLogger("tallyd").addHandler(logging.NullHandler())

SITE = {
    "version": 1,
    "number": 17,
    "layout": {"form": "packed", "bucket_bits": 13},
    "kinds": {"video": 1, "post": 2},
    "metrics": {"like": 1, "view": 2, "unread": 3},
    "api": ["post:like", "post:view"],
    "exchange": "site.events",
    "partition_by": "target",
    "at_min_s": 1262304000,
    "settable": ["video:unread"],
    "below_zero": ["video:unread"],
    "later": "a field of a later version",
}
PLAIN = {"form": "entity", "bucket_bits": 4, "counter_key": "{kind}/{id}"}


class Redis:
    """A fake node of Redis. It takes the place of a client of redis-py."""

    def __init__(self, site=SITE, numbers=None):
        self.site, self.numbers, self.commands = site, numbers or {}, []

    def answer(self, name, key, *arguments):
        if name == "GET":
            return None if self.site is None else json.dumps(self.site)
        if name == "HMGET":
            return [self.numbers.get((key, field)) for field in arguments]
        if name == "EVAL":
            _, bucket, number, field = arguments
            return [self.numbers.get((bucket, "_")), self.numbers.get((number, field))]
        return 1

    def pipeline(self, transaction):
        self.queued = []
        return self

    def execute_command(self, *command):
        self.queued.append(command)

    async def execute(self, raise_on_error):
        self.commands += self.queued
        return [self.answer(*command) for command in self.queued]

    def names(self):
        return [command[0] for command in self.commands]


class Broker:
    """A fake RabbitMQ."""

    def __init__(self):
        self.sent = []

    async def publish(self, event, message, ends_at):
        self.sent.append((message.exchange, message.routing_key))

    async def close(self):
        pass


def with_site(test):
    """Runs a test with a client of a fake Redis and a fake RabbitMQ."""

    def run(self):
        async def main():
            self.redis, self.broker = Redis(), Broker()
            self.site = AsyncTallyd("amqp://127.0.0.1:1", "redis://127.0.0.1:1")
            self.site._sender = ToRabbitmq(self.broker)
            self.reader = self.site._reads()
            self.reader._first = self.redis
            await test(self)

        asyncio.run(main())

    return run


class Cards(unittest.TestCase):
    def test_only_a_card_of_a_known_version_is_read(self):
        self.assertEqual(parsed(json.dumps(SITE)).settable, {"video:unread"})
        self.assertEqual(parsed(json.dumps({**SITE, "layout": PLAIN}).encode()).counter_key, "{kind}/{id}")
        bad = [{**SITE, "version": 2}, {**SITE, "layout": {"form": "new", "bucket_bits": 1}}, {**SITE, "kinds": 1}, [], 7, {"version": 1}]
        for text in (None, "", "no JSON", b"\xff", *map(json.dumps, bad)):
            self.assertIsNone(parsed(text), text)

    def test_a_wrong_url_of_redis_is_refused_at_once(self):
        for url in ("http://127.0.0.1", "127.0.0.1:6379", "redis://127.0.0.1:port"):
            for client in (Tallyd, AsyncTallyd):
                self.assertRaises(ValueError, client, redis_url=url)

    async def refused(self, reason, call):
        with self.assertRaises(RefusedError) as raised:
            await call
        self.assertEqual(raised.exception.reason, reason)
        return str(raised.exception)

    @with_site
    async def test_events_go_where_the_card_says(self):
        await self.site.like("video", 42, 7)
        await self.site.count("video", 43, "view")
        self.assertEqual(self.broker.sent, [("site.events", "42"), ("site.events", "43")])
        self.assertEqual(self.redis.commands, [("GET", "tally:c:site")])

    @with_site
    async def test_the_card_is_read_again_each_minute(self):
        await self.site.like("video", 42, 7)
        self.redis.site = {**SITE, "exchange": "other.events"}
        self.reader._due_at = 0
        await asyncio.gather(*(self.site.like("video", 42, 7) for _ in range(9)))
        self.redis.site = {**SITE, "version": 2}
        self.reader._due_at = 0
        await self.site.like("video", 42, 7)
        self.assertEqual((self.broker.sent[-1][0], self.redis.names()), ("other.events", ["GET"] * 3))

    @with_site
    async def test_an_unknown_name_is_refused_after_one_more_look(self):
        await self.refused("unknown-kind", self.site.like("song", 1, 1))
        await self.refused("unknown-metric", self.site.counts("video", [1], "share"))
        await self.refused("not-settable", self.site.set("video", 1, "view", 5))
        self.assertEqual(self.redis.names(), ["GET"] * 4)
        self.redis.site = {**SITE, "kinds": {"video": 1, "song": 3}}
        await self.site.like("song", 1, 1)
        await self.refused("target-id-out-of-range", self.site.like("song", 0, 1))
        self.assertEqual((len(self.broker.sent), self.redis.names()), (1, ["GET"] * 5))

    @with_site
    async def test_what_scripts_count_is_only_published_with_their_at(self):
        like = {"type": "like", "kind": "post", "target_id": 1, "user_id": 1}
        for call in (
            self.site.like("post", 1, 1),
            self.site.unlike("post", 1, 1, at=1795251385000005),
            self.site.count("post", 1, "view"),
            self.site.publish_many([like]),
        ):
            self.assertIn("docs/scripts.md", await self.refused("counted-by-api", call))
        await self.site.publish({**like, "at": 1795251385000005})
        await self.site.publish_many([{**like, "at": 1795251385000005}])
        self.assertEqual(len(self.broker.sent), 2)

    @with_site
    async def test_without_a_card_names_are_unchecked_and_numbers_unknown(self):
        self.redis.site = None
        self.assertEqual(await self.site.counts("song", [1], "share"), {1: None})
        await self.site.like("song", 1, 7)
        self.assertEqual((self.broker.sent, self.redis.names()), ([("tally.events", "7")], ["GET"]))

    @with_site
    async def test_each_outage_of_the_card_is_one_warning(self):
        with self.assertLogs("tallyd", "WARNING") as logs:
            for self.redis.site in (None, None, SITE, {**SITE, "version": 2}, None):
                self.reader._due_at = 0
                await self.site.like("video", 42, 7)
        self.assertEqual(len(logs.output), 2)
        self.assertIn("no card at tally:c:site", logs.output[0])

    @with_site
    async def test_without_redis_events_are_published(self):
        async def unreachable(raise_on_error):
            raise OSError("unreachable")

        async def silent(raise_on_error):
            await asyncio.sleep(60)

        for self.redis.execute in (unreachable, silent):
            self.reader._due_at = 0
            began = asyncio.get_running_loop().time()
            await self.site.like("song", 1, 7)
            self.assertLess(asyncio.get_running_loop().time() - began, 5 * CARD_READ_MAX_S)
            with self.assertRaisesRegex(ReadError, r"\((unreachable|no answer in .*)\): treat the numbers as unknown"):
                await self.site.counts("video", [1])
        self.assertEqual(self.broker.sent, [("tally.events", "7")] * 2)

    @with_site
    async def test_numbers_are_read_in_each_layout(self):
        loaded = {(f"tally:c:{{video:{letter}{bucket}}}", "_"): "3:9" for letter, bucket in (("", "3088"), ("h", "18"), ("s", "18"))}
        numbers = {("tally:c:{video:3088}", "42"): "12,-3,-4", ("tally:video/42", "like"): "12", ("tally:counter:42:like", ""): "12"}
        self.redis.numbers = {**loaded, **numbers}
        packed = [(await self.site.counts("video", [42], metric))[42] for metric in ("like", "view", "unread")]
        self.assertEqual(packed, [12, 0, -4])
        for layout in (PLAIN, {"form": "string", "bucket_bits": 4, "counter_key": "counter:{id}:{metric}"}):
            self.redis.site = {**SITE, "layout": layout}
            self.reader._due_at = 0
            self.assertEqual(await self.site.counts("video", [42, "45"]), {42: 12, "45": None})
            self.assertEqual(await self.site.counts("video", [42], "unread"), {42: 0})

    @with_site
    async def test_lost_buckets_are_noted_for_an_hour(self):
        # A daemon is already loading the bucket of 44.
        self.redis.numbers = {("tally:c:{video:35bd}", "_"): "~3:9"}
        self.assertEqual(await self.site.counts("video", [42, 43, 44]), {42: None, 43: None, 44: None})
        noted = [("SADD", "tally:c:missing", "video:201e", "video:3088"), ("EXPIRE", "tally:c:missing", 3600)]
        self.assertEqual(self.redis.commands[-2:], noted)

    @with_site
    async def test_a_cluster_is_read_at_each_keys_node(self):
        other = Redis(numbers={("tally:c:{video:3088}", "_"): "1:0", ("tally:c:{video:3088}", "42"): "5"})
        self.reader._nodes[("10.0.0.2", 6380)] = other
        here = self.redis.answer
        moved = ResponseError("MOVED 1795 10.0.0.2:6380")
        self.redis.answer = lambda name, key, *rest: moved if "3088" in key else here(name, key, *rest)
        for _ in range(2):
            self.assertEqual(await self.site.counts("video", [42, 43]), {42: 5, 43: None})
        self.assertEqual((self.redis.names().count("HMGET"), other.names()), (3, ["HMGET"] * 2))


class Lists(unittest.TestCase):
    def test_results_keep_the_order_of_the_list(self):
        class Broker:
            async def publish(self, event, message, ends_at):
                if event["target_id"] == "43":
                    raise NackedError("full", event)

        like = {"type": "like", "target_id": "42", "user_id": "7"}
        events = [{**like, "target_id": "43"}, like, {**like, "user_id": "8"}]
        nacked, *others = asyncio.run(ToRabbitmq(Broker()).publish(events, Card(), 0, None))
        self.assertEqual((type(nacked), nacked.event, others), (NackedError, events[0], events[1:]))


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
            read, like = sorted(errors, key=lambda error: type(error).__name__)
            self.assertEqual((type(read), type(like), like.event["user_id"]), (ReadError, UnconfirmedError, "7"))
            with self.assertRaisesRegex(RuntimeError, "closed"):
                site.like("video", 42, 7)


if __name__ == "__main__":
    unittest.main()
