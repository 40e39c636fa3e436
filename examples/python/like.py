#!/usr/bin/env python3
"""Likes a target: counts it in Redis at once, once, and publishes the event that tallyd writes to MySQL.

    like.py [--unlike] KIND TARGET_ID USER_ID
    like.py --read [--mysql] KIND TARGET_ID...         numbers of likes; of what Redis doesn't know from MySQL
    like.py --liked-by USER_ID KIND TARGET_ID...       whether the user likes each
    like.py --count METRIC=DELTA KIND TARGET_ID        another number than that of likes changes

Needs redis-py, pika and PyMySQL; on Debian: apt-get install python3-redis python3-pika python3-pymysql.
docs/clients.md explains each step.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
import urllib.parse
import uuid
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
METRICS = {"view"}  # the other names of [metrics]
KINDS = {"video": 1, "post": 2}  # [kinds]
# These must be the same for all API servers.
REMEMBERED_S = 120  # longer than an event takes into MySQL
CLICKS_MAX = int(os.environ.get("CLICKS_MAX", "0"))  # of a user in a window; 0 is any number
WINDOW_MS = 60_000
# How long each server has to answer.
TIMEOUT_S = 5

LUA = Path(__file__).resolve().parents[2] / "lua"
LIKE_SCRIPT = (LUA / "like.lua").read_text()
TAKE_BACK_SCRIPT = (LUA / "take_back.lua").read_text()
LIMIT_SCRIPT = (LUA / "limit.lua").read_text()

# ------------------------------------------------------------------ the contract: names and formats


def bucket_key(kind, target_id):
    """The hash that the target's numbers are in."""
    bucket = 1 << BUCKET_BITS | zlib.crc32(str(target_id).encode()) & ((1 << BUCKET_BITS) - 1)
    return f"{KEY_PREFIX}c:{{{kind}:{bucket:x}}}"


def keys(kind, target_id):
    """The target's bucket, and who clicked lately in it. All three are in one slot of a Cluster."""
    bucket = bucket_key(kind, target_id)
    recent = f"{KEY_PREFIX}recent:{bucket[bucket.index('{'):]}"
    return bucket, recent, f"{recent}:former"


def number_in(loaded, value, place=LIKE):
    """The number in a bucket's answer to HMGET of `_` and the id; None where it is unknown, which is not zero."""
    if loaded is None or loaded.startswith(b"~"):
        return None
    numbers = value.split(b",") if value else []
    try:
        return int(numbers[place - 1]) if len(numbers) >= place else 0
    except ValueError:
        return None


def an_id(text):
    """Digits alone: no sign, no leading zero, so that one id has one spelling."""
    if not re.fullmatch("[1-9][0-9]{0,18}", text) or int(text) > 2**63 - 1:
        raise ValueError(f"{text!r} is no id: 1 to {2**63 - 1}")
    return text


def a_time(at):
    if not 1 <= int(at) <= 253402300799999999:
        raise ValueError(f"{at} is no time")
    return int(at)


def event_of(event_type, kind, target_id, user_id, at, number=None):
    """What is published. Ids as text: not every language's numbers hold 64 bits."""
    if event_type not in ("like", "unlike"):
        raise ValueError(f"{event_type!r} is neither like nor unlike")
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not in [kinds]")
    event = {"type": event_type, "kind": kind, "target_id": an_id(target_id), "user_id": an_id(user_id), "at": a_time(at)}
    if number is not None:
        event["count"] = number
    return event


def count_event_of(kind, target_id, metric, delta, event_id, at):
    """The change of another number. To be sent again as it is: by `event_id` and `at` tallyd knows it."""
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not in [kinds]")
    if metric not in METRICS:
        raise ValueError(f"{metric!r} is not in [metrics], or the number of likes, which follows from likes")
    if not -(2**31) <= delta <= 2**31:
        raise ValueError(f"{delta} is too much")
    if not 1 <= len(event_id) <= 64:
        raise ValueError(f"{event_id!r} does not have 1 to 64 characters")
    event = {"type": "count", "kind": kind, "target_id": an_id(target_id)}
    return {**event, "metric": metric, "delta": delta, "event_id": event_id, "at": a_time(at)}


# ------------------------------------------------------------------ Redis: counting


def connect():
    # No retries: a call whose answer was lost may have counted.
    return redis.Redis.from_url(REDIS_URL, retry=Retry(NoBackoff(), 0), socket_timeout=TIMEOUT_S)


def call(server, script, *arguments):
    """Runs a script. What fails otherwise may have run."""
    try:
        return server.evalsha(hashlib.sha1(script.encode()).hexdigest(), *arguments)
    except redis.exceptions.NoScriptError:
        # A new server, or SCRIPT FLUSH: nothing was done. EVAL also makes the script known again.
        return server.eval(script, *arguments)


def wait_ms(server, user_id):
    """How long the user must wait; 0 where the click is allowed."""
    if CLICKS_MAX == 0:
        return 0
    is_allowed, left = call(server, LIMIT_SCRIPT, 1, f"{KEY_PREFIX}limit:{{{user_id}}}", CLICKS_MAX, WINDOW_MS)
    return 0 if is_allowed else left


def count(server, event_type, kind, target_id, user_id):
    """Counts a click in Redis if it changes what the user likes: says whether it does. Gives `at`, which the event must
    carry, and the target's number, None where it is unknown."""
    arguments = (3, *keys(kind, target_id), target_id, LIKE, event_type, user_id, REMEMBERED_S)
    result, *rest = call(server, LIKE_SCRIPT, *arguments, "")
    if result < 0:
        try:
            known = "like" if target_id in liked_in_mysql(kind, user_id, [target_id]) else "unlike"
        except pymysql.MySQLError:
            # Better one that may count twice until a reconcile finds it than none.
            known = "unlike" if event_type == "like" else "like"
        result, *rest = call(server, LIKE_SCRIPT, *arguments, known)
    at, number = rest
    return result == 1, int(at), number


def take_back(server, event):
    """A click that counts and could not be published; no reconcile has to find it then."""
    kind, target_id = event["kind"], event["target_id"]
    arguments = (target_id, LIKE, event["type"], event["user_id"], event["at"])
    return call(server, TAKE_BACK_SCRIPT, 3, *keys(kind, target_id), *arguments) == 1


# ------------------------------------------------------------------ RabbitMQ: publishing


def publish(event, tries=3):
    """Returns once the broker has the event on disk, in a queue. A real server keeps its connection."""
    parameters = pika.URLParameters(AMQP_URL)
    parameters.blocked_connection_timeout = TIMEOUT_S
    while True:
        tries -= 1
        try:
            connection = pika.BlockingConnection(parameters)
            channel = connection.channel()
            channel.confirm_delivery()
            channel.basic_publish(
                exchange=EXCHANGE,
                routing_key=event.get("user_id", event["target_id"]),
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


def click(server, event_type, kind, target_id, user_id):
    """The whole way of a like or an unlike. Gives the event, and whether it changed anything."""
    # What can't be published is not counted either.
    event_of(event_type, kind, target_id, user_id, 1)
    changed, at, number = count(server, event_type, kind, target_id, user_id)
    event = event_of(event_type, kind, target_id, user_id, at, number)
    try:
        # Even if nothing changed: perhaps nobody has published the user's last click, and twice is harmless.
        publish(event)
    except (pika.exceptions.AMQPError, OSError):
        if changed:
            take_back(server, event)
        raise
    return event, changed


# ------------------------------------------------------------------ reading


def read(server, kind, target_ids):
    """The targets' likes, in one round trip; None where Redis does not know them: then ask MySQL."""
    buckets = [bucket_key(kind, target_id) for target_id in target_ids]
    pipeline = server.pipeline(transaction=False)
    for bucket, target_id in zip(buckets, target_ids):
        pipeline.hmget(bucket, "_", target_id)
    answers = pipeline.execute()
    # So that tallyd loads them at once: video:3a2f.
    missing = {bucket[bucket.index("{") + 1 : -1] for bucket, (loaded, _) in zip(buckets, answers) if loaded is None}
    if missing:
        # Reading must not fail for it, for instance on a replica.
        with contextlib.suppress(redis.exceptions.RedisError):
            server.sadd(f"{KEY_PREFIX}tally:missing", *missing)
    return [number_in(loaded, value) for loaded, value in answers]


def read_or_ask(server, kind, target_ids):
    """The same, with MySQL's number where Redis does not know it. It lacks what is still on the way."""
    numbers = read(server, kind, target_ids)
    unknown = [target_id for target_id, number in zip(target_ids, numbers) if number is None]
    in_mysql = likes_in_mysql(kind, unknown)
    return [in_mysql[target_id] if number is None else number for target_id, number in zip(target_ids, numbers)]


def liked(server, kind, user_id, target_ids):
    """Whether the user likes each target: by the clicks of the last minutes, and for the rest by MySQL."""
    pipeline = server.pipeline(transaction=False)
    for target_id in target_ids:
        for key in keys(kind, target_id)[1:]:
            pipeline.hget(key, f"{target_id}:{user_id}")
    clicks = pipeline.execute()
    # The newer one first.
    lately = [newer or older for newer, older in zip(clicks[::2], clicks[1::2])]
    in_mysql = liked_in_mysql(kind, user_id, [target_id for target_id, last in zip(target_ids, lately) if not last])
    return [last.endswith(b"+") if last else target_id in in_mysql for target_id, last in zip(target_ids, lately)]


# ------------------------------------------------------------------ MySQL: what Redis does not know


def query(sql, *values):
    url = urllib.parse.urlsplit(MYSQL_URL)
    connection = pymysql.connect(
        host=url.hostname,
        port=url.port or 3306,
        user=urllib.parse.unquote(url.username or ""),
        password=urllib.parse.unquote(url.password or ""),
        database=url.path.lstrip("/"),
        connect_timeout=TIMEOUT_S,
        read_timeout=TIMEOUT_S,
    )
    with connection, connection.cursor() as cursor:
        cursor.execute(sql, values)
        return cursor.fetchall()


def liked_in_mysql(kind, user_id, target_ids):
    """Those of the targets that the user likes by what MySQL says, which must be the primary server."""
    if not target_ids:
        return set()
    rows = query(
        "SELECT target_id FROM like_record WHERE kind = %s AND target_id IN %s AND user_id = %s AND is_del = 0",
        KINDS[kind],
        [int(target_id) for target_id in target_ids],
        int(user_id),
    )
    return {str(target_id) for (target_id,) in rows}


def likes_in_mysql(kind, target_ids):
    """The numbers of likes by what MySQL says."""
    if not target_ids:
        return {}
    rows = query(
        "SELECT target_id, SUM(value) FROM counter WHERE kind = %s AND target_id IN %s AND metric = %s GROUP BY target_id",
        KINDS[kind],
        [int(target_id) for target_id in target_ids],
        LIKE,
    )
    return dict.fromkeys(target_ids, 0) | {str(target_id): int(number) for target_id, number in rows}


# ------------------------------------------------------------------ the command


def main():
    parser = argparse.ArgumentParser(description="likes a target, or reads likes")
    parser.add_argument("--unlike", action="store_true", help="the user likes it no longer")
    parser.add_argument("--read", action="store_true", help="print each target's likes instead")
    parser.add_argument("--mysql", action="store_true", help="with --read: ask MySQL for what Redis does not know")
    parser.add_argument("--liked-by", metavar="USER_ID", type=an_id, help="print whether the user likes each target instead")
    parser.add_argument("--count", metavar="METRIC=DELTA", help="another number than that of likes changes")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("ids", metavar="ID", type=an_id, nargs="+")
    arguments = parser.parse_args()

    server = connect()
    if arguments.read:
        numbers = (read_or_ask if arguments.mysql else read)(server, arguments.kind, arguments.ids)
        print(*("unknown" if number is None else number for number in numbers), sep="\n")
        return
    if arguments.liked_by:
        states = liked(server, arguments.kind, arguments.liked_by, arguments.ids)
        print(*("yes" if state else "no" for state in states), sep="\n")
        return
    if arguments.count:
        metric, delta = arguments.count.split("=")
        at = time.time_ns() // 1_000
        event = count_event_of(arguments.kind, arguments.ids[0], metric, int(delta), str(uuid.uuid4()), at)
        publish(event)
        print(json.dumps(event))
        return
    if len(arguments.ids) != 2:
        parser.error("a target and a user are needed")
    target_id, user_id = arguments.ids
    if ms := wait_ms(server, user_id):
        sys.exit(f"too many clicks: wait {ms} ms")
    event, changed = click(server, "unlike" if arguments.unlike else "like", arguments.kind, target_id, user_id)
    print(json.dumps({**event, "changed": changed}))


if __name__ == "__main__":
    sys.exit(main())
