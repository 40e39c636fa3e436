"""A like consumer as Python teams write it, with aio-pika and asyncmy: a multi-row upsert per batch, acknowledged
after the commit; the newest event wins; no counters."""

import asyncio
import json
import os
import sys
import time
from datetime import datetime, timedelta
from urllib.parse import urlsplit

import aio_pika
import asyncmy
import uvloop

BATCH = int(os.environ["BATCH"])
LINGER = int(os.environ["LINGER_MS"]) / 1000
KINDS = {"video": 1}
EPOCH = datetime(1970, 1, 1)
UPSERT = (
    "INSERT INTO like_record (kind, target_id, user_id, is_del, update_at) VALUES (%s, %s, %s, %s, %s) "
    "ON DUPLICATE KEY UPDATE is_del = IF(VALUES(update_at) > update_at, VALUES(is_del), is_del), "
    "update_at = GREATEST(update_at, VALUES(update_at))"
)


def say(event, events):
    line = {"event": event, "events": events, "at_us": time.time_ns() // 1_000}
    print(json.dumps(line), file=sys.stderr, flush=True)


def row(message):
    event = json.loads(message.body)
    return (
        KINDS[event["kind"]],
        int(event["target_id"]),
        int(event["user_id"]),
        event["type"] == "unlike",
        EPOCH + timedelta(microseconds=event["at"]),
    )


class Open:
    """The messages that arrived and are not written yet."""

    def __init__(self):
        self.messages = []
        self.any = asyncio.Event()
        self.full = asyncio.Event()

    async def push(self, message):
        self.messages.append(message)
        self.any.set()
        if len(self.messages) >= BATCH:
            self.full.set()

    async def batch(self):
        """A full batch, or all messages that arrived within LINGER after the first message."""
        await self.any.wait()
        try:
            async with asyncio.timeout(LINGER):
                await self.full.wait()
        except TimeoutError:
            pass
        batch, self.messages = self.messages[:BATCH], self.messages[BATCH:]
        if not self.messages:
            self.any.clear()
        if len(self.messages) < BATCH:
            self.full.clear()
        return batch


async def write_batches(messages, database):
    while True:
        batch = await messages.batch()
        async with database.cursor() as cursor:
            await cursor.executemany(UPSERT, sorted(map(row, batch)))
        await database.commit()
        await batch[-1].ack(multiple=True)
        say("batch-committed", len(batch))


async def main():
    url = urlsplit(os.environ["MYSQL_URL"])
    database = await asyncmy.connect(
        host=url.hostname, port=url.port, user=url.username, password=url.password, database=url.path[1:]
    )
    connection = await aio_pika.connect(os.environ["AMQP_URL"])
    channel = await connection.channel()
    await channel.set_qos(prefetch_count=int(os.environ["PREFETCH"]))
    queue = await channel.get_queue(os.environ["QUEUE"])
    messages = Open()
    say("consuming", 0)
    await queue.consume(messages.push)
    await write_batches(messages, database)


uvloop.run(main())
