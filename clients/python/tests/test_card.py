import asyncio
import json
import unittest

from tallyd import AsyncTallyd, ReadError, RefusedError
from tallyd.card import Card, parsed
from tallyd.reader import CARD_READ_MAX_S
from tallyd.sender import ToRabbitmq

SITE = {
    "version": 1,
    "number": 17,
    "layout": {"form": "packed", "bucket_bits": 13},
    "kinds": {"video": 1, "post": 2},
    "metrics": {"like": 1, "view": 2, "unread": 3},
    "api": ["post:like", "post:view"],
    "exchange": "site.events",
    "partition_by": "target",
    "settable": ["video:unread"],
    "below_zero": ["video:unread"],
    "later": "a field of a later version",
}
# Newer versions of redis-py send these commands when they connect.
GREETINGS = {"CLIENT": b"-ERR\r\n", "HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n"}
PLAIN = {"form": "entity", "bucket_bits": 4, "counter_key": "{kind}/{id}"}


class Redis:
    """A fake Redis server. `answer` gets a command as text, and returns the answer. A text that begins with "-" is an error."""

    def __init__(self, site=SITE, numbers=None):
        self.site, self.numbers, self.commands, self.is_silent = site, numbers or {}, [], False

    def answer(self, name, key, *arguments):
        if name == "GET":
            return None if self.site is None else json.dumps(self.site)
        if name == "HMGET":
            return [self.numbers.get((key, field)) for field in arguments]
        if name == "EVAL":
            _, bucket, number, field = arguments
            return [self.numbers.get((bucket, "_")), self.numbers.get((number, field))]
        return 1

    async def serve(self, reader, writer):
        null = b"$-1\r\n"
        while line := await reader.readline():
            parts = []
            for _ in range(int(line[1:])):
                size = int((await reader.readline())[1:])
                parts.append((await reader.readexactly(size + 2))[:-2].decode())
            if parts[0] in GREETINGS:
                answer = GREETINGS[parts[0]]
                null = b"_\r\n" if parts[0] == "HELLO" else null
            else:
                self.commands.append(parts)
                answer = encoded(self.answer(*parts), null)
            if not self.is_silent:
                writer.write(answer)
        writer.close()

    async def start(self):
        self.server = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return f"redis://127.0.0.1:{self.port}"

    def names(self):
        return [command[0] for command in self.commands]


def encoded(answer, null):
    if isinstance(answer, list):
        return b"*%d\r\n" % len(answer) + b"".join(encoded(value, null) for value in answer)
    if answer is None:
        return null
    if isinstance(answer, int):
        return b":%d\r\n" % answer
    return f"{answer}\r\n".encode() if answer.startswith("-") else f"${len(answer.encode())}\r\n{answer}\r\n".encode()


class Broker:
    """A fake RabbitMQ."""

    def __init__(self):
        self.sent = []

    async def publish(self, event, exchange, routing_key, body, ends_at, traceparent):
        self.sent.append((exchange, routing_key))

    async def close(self):
        pass


def with_site(test):
    """Runs a test with a client of a fake Redis and a fake RabbitMQ."""

    def run(self):
        async def main():
            self.redis, self.broker = Redis(), Broker()
            self.site = AsyncTallyd("amqp://127.0.0.1:1", await self.redis.start())
            self.site._sender = ToRabbitmq(self.broker)
            async with self.site:
                await test(self)
            self.redis.server.close()

        asyncio.run(main())

    return run


class Cards(unittest.TestCase):
    def test_only_a_card_of_a_known_version_is_read(self):
        self.assertEqual(parsed(json.dumps(SITE)).settable, {"video:unread"})
        self.assertEqual(parsed(json.dumps({**SITE, "layout": PLAIN}).encode()).counter_key, "{kind}/{id}")
        bad = [{**SITE, "version": 2}, {**SITE, "layout": {"form": "new", "bucket_bits": 1}}, {**SITE, "kinds": 1}, [], 7, {"version": 1}]
        for text in (None, "", "no JSON", b"\xff", *map(json.dumps, bad)):
            self.assertIsNone(parsed(text), text)

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
        self.assertEqual(self.redis.commands, [["GET", "tally:c:site"]])

    @with_site
    async def test_the_card_is_read_again_each_minute(self):
        await self.site.like("video", 42, 7)
        self.redis.site = {**SITE, "exchange": "other.events"}
        self.site._reader._due_at = 0
        await asyncio.gather(*(self.site.like("video", 42, 7) for _ in range(9)))
        self.redis.site = {**SITE, "version": 2}
        self.site._reader._due_at = 0
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
            self.site.unlike("post", 1, 1, at=5),
            self.site.count("post", 1, "view"),
            self.site.publish_many([like]),
        ):
            self.assertIn("docs/scripts.md", await self.refused("counted-by-api", call))
        await self.site.publish({**like, "at": 5})
        await self.site.publish_many([{**like, "at": 5}])
        self.assertEqual(len(self.broker.sent), 2)

    @with_site
    async def test_without_a_card_names_are_unchecked_and_numbers_unknown(self):
        self.redis.site = None
        self.assertEqual(await self.site.counts("song", [1], "share"), {1: None})
        await self.site.like("song", 1, 7)
        self.assertEqual((self.broker.sent, self.redis.names()), ([("tally.events", "7")], ["GET"]))

    def test_without_redis_events_are_published(self):
        async def main():
            broker, silent = Broker(), Redis()
            silent.is_silent = True
            for url in ("redis://127.0.0.1:1", await silent.start()):
                async with AsyncTallyd("amqp://127.0.0.1:1", url, deadline_s=1) as site:
                    site._sender = ToRabbitmq(broker)
                    began = asyncio.get_running_loop().time()
                    await site.like("song", 1, 7)
                    self.assertLess(asyncio.get_running_loop().time() - began, 5 * CARD_READ_MAX_S)
                    await asyncio.wait([site._reader._reading])
                    with self.assertRaisesRegex(ReadError, "unknown"):
                        await site.counts("video", [1])
            self.assertEqual(broker.sent, [("tally.events", "7")] * 2)
            silent.server.close()

        asyncio.run(main())

    @with_site
    async def test_numbers_are_read_in_each_layout(self):
        loaded = {(f"tally:c:{{video:{letter}{bucket}}}", "_"): "3:9" for letter, bucket in (("", "3088"), ("h", "18"), ("s", "18"))}
        numbers = {("tally:c:{video:3088}", "42"): "12,3,-4", ("tally:video/42", "like"): "12", ("tally:counter:42:like", ""): "12"}
        self.redis.numbers = {**loaded, **numbers}
        packed = [(await self.site.counts("video", [42], metric))[42] for metric in ("like", "view", "unread")]
        self.assertEqual(packed, [12, 3, -4])
        for layout in (PLAIN, {"form": "string", "bucket_bits": 4}):
            self.redis.site = {**SITE, "layout": layout}
            self.site._reader._due_at = 0
            self.assertEqual(await self.site.counts("video", [42, "45"]), {42: 12, "45": None})
            self.assertEqual(await self.site.counts("video", [42], "unread"), {42: 0})

    @with_site
    async def test_lost_buckets_are_noted_for_an_hour(self):
        self.assertEqual(await self.site.counts("video", [42, 43]), {42: None, 43: None})
        noted = [["SADD", "tally:c:missing", "video:201e", "video:3088"], ["EXPIRE", "tally:c:missing", "3600"]]
        self.assertEqual(self.redis.commands[-2:], noted)

    @with_site
    async def test_a_cluster_is_read_at_each_keys_node(self):
        other = Redis(numbers={("tally:c:{video:3088}", "_"): "1:0", ("tally:c:{video:3088}", "42"): "5"})
        await other.start()
        here = self.redis.answer
        self.redis.answer = lambda name, key, *rest: f"-MOVED 1795 127.0.0.1:{other.port}" if "3088" in key else here(name, key, *rest)
        for _ in range(2):
            self.assertEqual(await self.site.counts("video", [42, 43]), {42: 5, 43: None})
        self.assertEqual((self.redis.names().count("HMGET"), other.names()), (3, ["HMGET"] * 2))
        other.server.close()


if __name__ == "__main__":
    unittest.main()
