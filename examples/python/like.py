#!/usr/bin/env python3
"""Likes a target: counts it in Redis at once, and publishes the event that tallyd writes to MySQL.

    like.py [--unlike] KIND TARGET_ID USER_ID
    like.py --read KIND TARGET_ID

Needs redis-py and pika; on Debian: apt-get install python3-redis python3-pika.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import zlib
from pathlib import Path

import pika
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
# These must be as in tallyd's config.toml.
EXCHANGE = os.environ.get("EXCHANGE", "tally.events")  # [amqp] prefix, then ".events"
KEY_PREFIX = os.environ.get("KEY_PREFIX", "")  # [redis] key_prefix
BUCKET_BITS = int(os.environ.get("BUCKET_BITS", "13"))  # [redis] bucket_bits
LIKE = 1  # [metrics] like

SCRIPT = (Path(__file__).resolve().parents[2] / "lua" / "like.lua").read_text()
SCRIPT_SHA = hashlib.sha1(SCRIPT.encode()).hexdigest()


def bucket_key(kind, target_id):
    """The hash that the target's numbers are in."""
    bucket = zlib.crc32(str(target_id).encode()) & ((1 << BUCKET_BITS) - 1)
    return f"{KEY_PREFIX}c:{{{kind}:{bucket:x}}}"


def count(server, event_type, kind, target_id):
    """Counts in Redis. Gives `at`, which the event must carry, and the target's new number, None if unknown."""
    arguments = (1, bucket_key(kind, target_id), target_id, LIKE, event_type)
    try:
        at, number = server.evalsha(SCRIPT_SHA, *arguments)
    except redis.exceptions.NoScriptError:
        # A new server, or SCRIPT FLUSH: nothing was counted. EVAL also makes the script known again.
        at, number = server.eval(SCRIPT, *arguments)
    return int(at), number


def publish(event, tries=3):
    """Returns once the broker has the event on disk, in a queue. A real server keeps its connection."""
    while True:
        tries -= 1
        try:
            connection = pika.BlockingConnection(pika.URLParameters(AMQP_URL))
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish(
                exchange=EXCHANGE,
                routing_key=event["user_id"],
                body=json.dumps(event).encode(),
                properties=pika.BasicProperties(content_type="application/json", delivery_mode=2),
                mandatory=True,
            )
            connection.close()
            return
        except (pika.exceptions.AMQPConnectionError, pika.exceptions.NackError):
            # Perhaps it arrived. The same event again is harmless, counting again would not be.
            if tries == 0:
                raise


def read(server, kind, target_id):
    """The target's likes; None where Redis does not know them: then ask MySQL."""
    key = bucket_key(kind, target_id)
    loaded, value = server.hmget(key, "_", target_id)
    if loaded is None:
        # So that tallyd loads it at once: video:1a2f. Reading must not fail for it, for instance on a replica.
        with contextlib.suppress(redis.exceptions.RedisError):
            server.sadd(f"{KEY_PREFIX}tally:missing", key[key.index("{") + 1 : -1])
    if loaded is None or loaded.startswith(b"~"):
        return None
    numbers = (value or b"").split(b",")
    return int(numbers[LIKE - 1] or 0) if len(numbers) >= LIKE else 0


def main():
    parser = argparse.ArgumentParser(description="likes a target")
    parser.add_argument("--unlike", action="store_true", help="the user likes it no longer")
    parser.add_argument("--read", action="store_true", help="print the target's likes instead")
    parser.add_argument("kind")
    parser.add_argument("target_id", type=int)
    parser.add_argument("user_id", type=int, nargs="?")
    arguments = parser.parse_args()

    # No retries: a call whose answer was lost may have counted.
    server = redis.Redis.from_url(REDIS_URL, retry=Retry(NoBackoff(), 0), socket_timeout=5)
    if arguments.read:
        number = read(server, arguments.kind, arguments.target_id)
        print("unknown" if number is None else number)
        return
    if arguments.user_id is None:
        parser.error("USER_ID is missing")

    event_type = "unlike" if arguments.unlike else "like"
    at, number = count(server, event_type, arguments.kind, arguments.target_id)
    event = {
        "type": event_type,
        "kind": arguments.kind,
        # As text: not every language's numbers hold 64 bits.
        "target_id": str(arguments.target_id),
        "user_id": str(arguments.user_id),
        "at": at,
    }
    if number is not None:
        event["count"] = number
    publish(event)
    print(json.dumps(event))


if __name__ == "__main__":
    sys.exit(main())
