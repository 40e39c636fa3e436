#!/usr/bin/env python3
"""Likes a target: counts it in Redis at once, once, and publishes the event that tallyd writes to MySQL.

    like.py [--unlike] KIND TARGET_ID USER_ID
    like.py --read KIND TARGET_ID

Needs redis-py, pika and PyMySQL; on Debian: apt-get install python3-redis python3-pika python3-pymysql.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import urllib.parse
import zlib
from pathlib import Path

import pika
import pymysql
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
MYSQL_URL = os.environ.get("MYSQL_URL", "mysql://root@127.0.0.1:3306/tally")  # the primary server
# These must be as in tallyd's config.toml.
EXCHANGE = os.environ.get("EXCHANGE", "tally.events")  # [amqp] prefix, then ".events"
KEY_PREFIX = os.environ.get("KEY_PREFIX", "")  # [redis] key_prefix
BUCKET_BITS = int(os.environ.get("BUCKET_BITS", "13"))  # [redis] bucket_bits
LIKE = 1  # [metrics] like
KINDS = {"video": 1}  # [kinds]
REMEMBERED_S = 120  # longer than an event takes into MySQL

LUA = Path(__file__).resolve().parents[2] / "lua"
LIKE_SCRIPT = (LUA / "like.lua").read_text()
TAKE_BACK_SCRIPT = (LUA / "take_back.lua").read_text()


def bucket_key(kind, target_id):
    """The hash that the target's numbers are in."""
    bucket = 1 << BUCKET_BITS | zlib.crc32(str(target_id).encode()) & ((1 << BUCKET_BITS) - 1)
    return f"{KEY_PREFIX}c:{{{kind}:{bucket:x}}}"


def keys(kind, target_id):
    """The target's bucket, and who clicked lately in it. All three are in one slot of a Cluster."""
    bucket = bucket_key(kind, target_id)
    recent = f"{KEY_PREFIX}recent:{bucket[bucket.index('{'):]}"
    return bucket, recent, f"{recent}:former"


def call(server, script, *arguments):
    """Runs a script. What fails otherwise may have run."""
    try:
        return server.evalsha(hashlib.sha1(script.encode()).hexdigest(), *arguments)
    except redis.exceptions.NoScriptError:
        # A new server, or SCRIPT FLUSH: nothing was done. EVAL also makes the script known again.
        return server.eval(script, *arguments)


def likes(kind, target_id, user_id):
    """What MySQL says of the user: asked only where Redis has no click of the last minutes."""
    url = urllib.parse.urlsplit(MYSQL_URL)
    connection = pymysql.connect(
        host=url.hostname,
        port=url.port or 3306,
        user=urllib.parse.unquote(url.username or ""),
        password=urllib.parse.unquote(url.password or ""),
        database=url.path.lstrip("/"),
        read_timeout=5,
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT 1 FROM like_record WHERE kind = %s AND target_id = %s AND user_id = %s AND is_del = 0",
            (KINDS[kind], target_id, user_id),
        )
        return "like" if cursor.fetchone() else "unlike"


def count(server, event_type, kind, target_id, user_id):
    """Counts a click in Redis if it changes what the user likes: says whether it does. Gives `at`, which the event must
    carry, and the target's number, None where it is unknown."""
    arguments = (3, *keys(kind, target_id), target_id, LIKE, event_type, user_id, REMEMBERED_S)
    result, *rest = call(server, LIKE_SCRIPT, *arguments, "")
    if result < 0:
        result, *rest = call(server, LIKE_SCRIPT, *arguments, likes(kind, target_id, user_id))
    at, number = rest
    return result == 1, int(at), number


def take_back(server, event):
    """A click that counts and could not be published; no reconcile has to find it then."""
    kind, target_id = event["kind"], event["target_id"]
    arguments = (target_id, LIKE, event["type"], event["user_id"], event["at"])
    return call(server, TAKE_BACK_SCRIPT, 3, *keys(kind, target_id), *arguments) == 1


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
            with contextlib.suppress(pika.exceptions.AMQPError):
                connection.close()
            return
        except (pika.exceptions.AMQPConnectionError, pika.exceptions.NackError, OSError):
            # Perhaps it arrived. The same event again is harmless, counting again would not be.
            if tries == 0:
                raise


def read(server, kind, target_id):
    """The target's likes; None where Redis does not know them: then ask MySQL."""
    key = bucket_key(kind, target_id)
    loaded, value = server.hmget(key, "_", target_id)
    if loaded is None:
        # So that tallyd loads it at once: video:3a2f. Reading must not fail for it, for instance on a replica.
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
    changed, at, number = count(server, event_type, arguments.kind, arguments.target_id, arguments.user_id)
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
    try:
        # Even if nothing changed: perhaps nobody has published the user's last click, and twice is harmless.
        publish(event)
    except (pika.exceptions.AMQPError, OSError):
        if changed:
            take_back(server, event)
        raise
    print(json.dumps({**event, "changed": changed}))


if __name__ == "__main__":
    sys.exit(main())
