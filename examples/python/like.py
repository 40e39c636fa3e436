#!/usr/bin/env python3
"""Likes a target: counts it once in Redis, immediately, and publishes the event that tallyd writes to MySQL.

    like.py [--unlike] KIND TARGET_ID USER_ID
    like.py --read [--mysql] KIND TARGET_ID...         numbers of likes; --mysql asks MySQL if Redis doesn't know them
    like.py --liked-by USER_ID KIND TARGET_ID...       whether the user likes each target
    like.py --count METRIC=DELTA [--event-id ID --at MICROSECONDS] KIND TARGET_ID
                                                       changes a number other than likes; to retry, pass the same ID and
                                                       MICROSECONDS, which it prints

Needs redis-py, pika and PyMySQL; on Debian: apt-get install python3-redis python3-pika python3-pymysql.
docs/scripts.md explains each step.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import sys
import time
import uuid
import zlib
from pathlib import Path

import pika
import pymysql
import redis
from board import board_keys
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from redis.backoff import NoBackoff
from redis.retry import Retry
from rows import TIMEOUT_S, query

REDIS_URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
AMQP_URL = os.environ.get("AMQP_URL", "amqp://guest:guest@127.0.0.1:5672/%2f")
# These settings must be as in tallyd's config.toml.
EXCHANGE = os.environ.get("EXCHANGE", "tally.events")  # [amqp] prefix, then ".events"
KEY_PREFIX = os.environ.get("KEY_PREFIX", "tally:")  # [redis] key_prefix
BUCKET_BITS = int(os.environ.get("BUCKET_BITS", "13"))  # [redis] bucket_bits
LIKE = 1  # [metrics] like
METRICS = {"view"}  # the other names of [metrics]
KINDS = {"video": 1, "post": 2}  # [kinds]
FILTERS = os.environ.get("FILTERS", "0") == "1"  # set it before [filter] likes_min
BOARD = os.environ.get("BOARD", "")  # a [[board]] with the tie "member" that likes count on; empty for none
BOARD_PERIODS = os.environ.get("BOARD_PERIODS", "total").split()  # period of each [[board]] of that name
# These settings must be the same for all API servers.
REMEMBERED_S = 120  # longer than an event needs to reach MySQL
CLICKS_MAX = int(os.environ.get("CLICKS_MAX", "0"))  # of a user in a window; 0 for no limit
WINDOW_MS = 60_000

LUA = Path(__file__).resolve().parents[2] / "lua"
LIKE_SCRIPT = (LUA / "like.lua").read_text()
TAKE_BACK_SCRIPT = (LUA / "take_back.lua").read_text()
LIMIT_SCRIPT = (LUA / "limit.lua").read_text()
BOARD_SCRIPT = (LUA / "board.lua").read_text()

# ------------------------------------------------------------------ the contract: names and formats


class Refused(ValueError):
    """The error for an event that tallyd would reject. So the click must not be counted."""

    def __init__(self, reason, value):
        super().__init__(f"{reason}: {value!r}")
        self.reason = reason


def an_id(value, reason="target-id-out-of-range"):
    """Returns the id as text. The id must have only digits, no sign and no leading zero, so that it has only
    one spelling."""
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not re.fullmatch("[1-9][0-9]{0,18}", text) or int(text) > 2**63 - 1:
        raise Refused(reason, value)
    return text


def bucket_key(kind, target_id):
    """Returns the key of the hash that has the target's numbers."""
    bucket = 1 << BUCKET_BITS | zlib.crc32(str(target_id).encode()) & ((1 << BUCKET_BITS) - 1)
    return f"{KEY_PREFIX}c:{{{kind}:{bucket:x}}}"


def keys(kind, target_id):
    """Returns the keys of the target's bucket and of the two hashes with its recent clicks. In a Redis Cluster, all
    three keys are in one slot."""
    bucket = bucket_key(kind, target_id)
    recent = f"{KEY_PREFIX}recent:{bucket[bucket.index('{'):]}"
    return bucket, recent, f"{recent}:former"


def filter_keys(kind, target_id):
    """Returns further keys that like.lua needs if there are Bloom filters. Without these keys, the like would be
    missing in the filter."""
    bucket = bucket_key(kind, target_id)
    name = f"{KEY_PREFIX}filter:{bucket[bucket.index('{'):]}:{target_id}"
    return bucket, name, f"{name}:config", f"{name}:added"


def number_in(loaded, value, place=LIKE):
    """Returns the number in a bucket's answer to HMGET of `_` and the id. `None` means that the number is unknown,
    not that it is zero."""
    if loaded is None or loaded.startswith(b"~"):
        return None
    numbers = value.split(b",") if value else []
    try:
        return int(numbers[place - 1]) if len(numbers) >= place else 0
    except ValueError:
        return None


def is_missing(loaded):
    """Returns whether Redis has lost the bucket. `loaded` is the value of the bucket's field `_`."""
    return loaded is None


def missing_name(bucket):
    """Returns the bucket's name in the set `tally:c:missing`, for instance video:3a2f."""
    return bucket[bucket.index("{") + 1 : -1]


# 2010: an earlier time is probably in milliseconds.
AT_MIN = 1262304000000000


def a_time(at):
    text = str(at) if type(at) is int else at
    if not isinstance(text, str) or not re.fullmatch("[0-9]{1,18}", text) or not 1 <= int(text) <= 253402300799999999:
        raise Refused("at-out-of-range", at)
    if int(text) < AT_MIN:
        raise Refused("at-too-early", at)
    return int(text)


def event_of(event_type, kind, target_id, user_id, at, number=None):
    """Returns the event to publish. Ids are text, because numbers have fewer than 64 bits in some languages."""
    if event_type not in ("like", "unlike"):
        raise Refused("unknown-type", event_type)
    if kind not in KINDS:
        raise Refused("unknown-kind", kind)
    ids = {"target_id": an_id(target_id), "user_id": an_id(user_id, "user-id-out-of-range")}
    event = {"type": event_type, "kind": kind, **ids, "at": a_time(at)}
    if number is not None:
        event["count"] = number
    return event


def count_event_of(kind, target_id, metric, delta, event_id, at):
    """Returns an event that changes a number other than likes. To retry, publish the same event: tallyd recognizes it
    by `event_id` and `at`."""
    if kind not in KINDS:
        raise Refused("unknown-kind", kind)
    target_id = an_id(target_id)
    if metric not in METRICS:
        # This also refuses the metric `like`: only likes and unlikes may change that metric.
        raise Refused("unknown-metric", metric)
    # Refuse 1.0 and True, because JSON writes them differently.
    if type(delta) is not int or not -(2**31) <= delta <= 2**31:
        raise Refused("delta-out-of-range", delta)
    if not isinstance(event_id, str) or not 1 <= len(event_id) <= 64:
        raise Refused("event-id-out-of-range", event_id)
    event = {"type": "count", "kind": kind, "target_id": target_id, "metric": metric, "delta": delta}
    return {**event, "event_id": event_id, "at": a_time(at)}


# ------------------------------------------------------------------ Redis: counting


def connect():
    # Don't retry: if only the answer was lost, Redis has already counted the change.
    return redis.Redis.from_url(REDIS_URL, retry=Retry(NoBackoff(), 0), socket_timeout=TIMEOUT_S)


def call(server, script, *arguments):
    """Runs a script. If this raises an error, the script may have run."""
    try:
        return server.evalsha(hashlib.sha1(script.encode()).hexdigest(), *arguments)
    except redis.exceptions.NoScriptError:
        # The server is new, or SCRIPT FLUSH ran: the script did not run. EVAL runs and loads it.
        return server.eval(script, *arguments)


def wait_ms(server, user_id):
    """Returns how many milliseconds the user must wait, or 0 if the click is allowed."""
    if CLICKS_MAX == 0:
        return 0
    key = f"{KEY_PREFIX}limit:{{{an_id(user_id, 'user-id-out-of-range')}}}"
    is_allowed, left = call(server, LIMIT_SCRIPT, 1, key, CLICKS_MAX, WINDOW_MS, str(uuid.uuid4()))
    return 0 if is_allowed else left


def call_like(server, *arguments):
    """Runs like.lua, and retries once if its answer was lost. The script remembers the click, so the click counts
    once."""
    try:
        return call(server, LIKE_SCRIPT, *arguments)
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
        return call(server, LIKE_SCRIPT, *arguments)


def count(server, event_type, kind, target_id, user_id):
    """Counts a click in Redis if it changes what the user likes. Returns whether the click changed something,
    and `at`, which the event must carry. Also returns the target's number of likes, or `None` if it is unknown."""
    target_id, user_id = an_id(target_id), an_id(user_id, "user-id-out-of-range")
    where = keys(kind, target_id) + (filter_keys(kind, target_id) if FILTERS else ())
    click = (len(where), *where, target_id, LIKE, event_type, user_id, REMEMBERED_S)
    result, *rest = call_like(server, *click, "")
    if result < 0:
        try:
            row = clicks_in_mysql(kind, user_id, [target_id]).get(target_id, "0-")
        except pymysql.MySQLError:
            # Count the click: it may count twice until a full reconcile, but no click is lost.
            row = "0-" if event_type == "like" else "0+"
        result, *rest = call_like(server, *click, row)
    at, number = rest
    return result == 1, int(at), number


def take_back(server, event):
    """Takes back a click that could not be published. Returns True if the click no longer counts and no other request
    publishes it."""
    kind, target_id = event["kind"], event["target_id"]
    arguments = (target_id, LIKE, event["type"], event["user_id"], event["at"])
    return call(server, TAKE_BACK_SCRIPT, 3, *keys(kind, target_id), *arguments) == 1


def count_on_board(server, event, delta):
    """Adds the click to the board. The click counts even if this fails."""
    if BOARD:
        # The event's time decides the periods, so the same periods change if the click is taken back.
        boards = board_keys(BOARD, BOARD_PERIODS, event["at"] // 1_000_000, KEY_PREFIX)
        with contextlib.suppress(redis.exceptions.RedisError):
            call(server, BOARD_SCRIPT, len(boards), *boards, event["target_id"], delta)


# ------------------------------------------------------------------ RabbitMQ: publishing


@contextlib.contextmanager
def channel_to_publish():
    parameters = pika.URLParameters(AMQP_URL)
    parameters.socket_timeout = parameters.stack_timeout = parameters.blocked_connection_timeout = TIMEOUT_S
    parameters.connection_attempts = 1
    connection = pika.BlockingConnection(parameters)
    # pika waits for a confirm without a limit. This timer ends the wait by closing the connection.
    late = pika.exceptions.AMQPConnectionError(f"no answer within {TIMEOUT_S} s")
    connection._impl.ioloop.call_later(TIMEOUT_S, lambda: connection._impl._terminate_stream(late))
    try:
        yield connection.channel()
    finally:
        # Only the first result matters: a confirm or an error.
        with contextlib.suppress(pika.exceptions.AMQPError):
            connection.close()


def publish(event, tries=3):
    """Publishes an event, and returns when the broker has stored it on disk in a queue. A real server should keep the
    connection open."""
    while True:
        tries -= 1
        try:
            with channel_to_publish() as channel:
                channel.confirm_delivery()
                return channel.basic_publish(
                    exchange=EXCHANGE,
                    routing_key=event.get("user_id", event["target_id"]),
                    body=json.dumps(event).encode(),
                    properties=pika.BasicProperties(content_type="application/json", delivery_mode=2),
                    mandatory=True,
                )
        except (pika.exceptions.AMQPConnectionError, AMQPConnectorException, pika.exceptions.NackError, OSError):
            # Perhaps the event arrived. Sending the same event again is harmless, but counting again is not.
            if tries == 0:
                raise


def click(server, event_type, kind, target_id, user_id):
    """Counts and publishes a like or an unlike. Returns the event, and whether the click changed anything."""
    # An event that can't be published must not be counted.
    event_of(event_type, kind, target_id, user_id, AT_MIN)
    changed, at, number = count(server, event_type, kind, target_id, user_id)
    event = event_of(event_type, kind, target_id, user_id, at, number)
    delta = 1 if event_type == "like" else -1
    if changed:
        count_on_board(server, event, delta)
    try:
        # Publish even if nothing changed: perhaps the user's last click was never published, and a repeated event is
        # harmless.
        publish(event)
    except Exception:
        # An error here must not hide the reason why publishing failed.
        with contextlib.suppress(redis.exceptions.RedisError):
            if take_back(server, event):
                count_on_board(server, event, -delta)
        raise
    return event, changed


# ------------------------------------------------------------------ reading


def read(server, kind, target_ids):
    """Reads the targets' numbers of likes, in one round trip. A number is `None` if Redis does not know it: then
    ask MySQL."""
    buckets = [bucket_key(kind, an_id(target_id)) for target_id in target_ids]
    pipeline = server.pipeline(transaction=False)
    for bucket, target_id in zip(buckets, target_ids):
        pipeline.hmget(bucket, "_", target_id)
    answers = pipeline.execute()
    # tallyd immediately loads the buckets in this set.
    missing = {missing_name(bucket) for bucket, (loaded, _) in zip(buckets, answers) if is_missing(loaded)}
    if missing:
        # If SADD fails, for instance on a replica, the read must still succeed.
        with contextlib.suppress(redis.exceptions.RedisError):
            server.sadd(f"{KEY_PREFIX}c:missing", *missing)
    return [number_in(loaded, value) for loaded, value in answers]


def read_or_ask(server, kind, target_ids):
    """Reads the numbers as `read` does, and asks MySQL for numbers that Redis does not know. MySQL does not
    include events in flight yet."""
    target_ids = [an_id(target_id) for target_id in target_ids]
    numbers = read(server, kind, target_ids)
    unknown = [target_id for target_id, number in zip(target_ids, numbers) if number is None]
    in_mysql = likes_in_mysql(kind, unknown)
    return [in_mysql[target_id] if number is None else number for target_id, number in zip(target_ids, numbers)]


def liked(server, kind, user_id, target_ids):
    """Returns whether the user likes each target. Redis knows the clicks of the last minutes, and MySQL knows older
    clicks."""
    user_id, target_ids = an_id(user_id, "user-id-out-of-range"), [an_id(target_id) for target_id in target_ids]
    pipeline = server.pipeline(transaction=False)
    for target_id in target_ids:
        for key in keys(kind, target_id)[1:]:
            pipeline.hget(key, f"{target_id}:{user_id}")
    clicks = pipeline.execute()
    # The newer click comes first.
    lately = [newer or older for newer, older in zip(clicks[::2], clicks[1::2])]
    in_mysql = clicks_in_mysql(kind, user_id, [target_id for target_id, last in zip(target_ids, lately) if not last])
    last = [last.decode() if last else in_mysql.get(target_id, "-") for target_id, last in zip(target_ids, lately)]
    return [click.endswith("+") for click in last]


# ------------------------------------------------------------------ MySQL: data that Redis does not know


def clicks_in_mysql(kind, user_id, target_ids):
    """Returns the user's last click on each target in MySQL, which must be the primary server: `at`, with `+` for a
    like or `-` for an unlike."""
    if not target_ids:
        return {}
    rows = query(
        "SELECT target_id, CONCAT(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', update_at), IF(is_del, '-', '+')) "
        "FROM like_record WHERE kind = %s AND target_id IN %s AND user_id = %s",
        KINDS[kind],
        [int(target_id) for target_id in target_ids],
        int(user_id),
    )
    return {str(target_id): click for target_id, click in rows}


def likes_in_mysql(kind, target_ids):
    """Returns the targets' numbers of likes in MySQL."""
    if not target_ids:
        return {}
    rows = query(
        "SELECT target_id, SUM(value) FROM counter WHERE kind = %s AND target_id IN %s AND metric = %s GROUP BY target_id",
        KINDS[kind],
        [int(target_id) for target_id in target_ids],
        LIKE,
    )
    return dict.fromkeys(map(an_id, target_ids), 0) | {str(target_id): int(number) for target_id, number in rows}


# ------------------------------------------------------------------ the command


def main():
    parser = argparse.ArgumentParser(description="likes a target, or reads likes")
    parser.add_argument("--unlike", action="store_true", help="unlike instead of like")
    parser.add_argument("--read", action="store_true", help="print each target's likes instead")
    parser.add_argument("--mysql", action="store_true", help="with --read: ask MySQL for numbers that Redis does not know")
    parser.add_argument("--liked-by", metavar="USER_ID", type=an_id, help="print whether the user likes each target instead")
    parser.add_argument("--count", metavar="METRIC=DELTA", help="change a number other than likes")
    parser.add_argument("--event-id", default=str(uuid.uuid4()), help="with --count: the id of the event to retry")
    parser.add_argument("--at", type=a_time, default=time.time_ns() // 1_000, help="with --count: the time of the event to retry, in microseconds")
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
        event = count_event_of(arguments.kind, arguments.ids[0], metric, int(delta), arguments.event_id, arguments.at)
        # Print the event before publishing, because the caller needs it for a retry.
        print(json.dumps(event), flush=True)
        return publish(event)
    if len(arguments.ids) != 2:
        parser.error("pass a target and a user")
    target_id, user_id = arguments.ids
    if ms := wait_ms(server, user_id):
        sys.exit(f"the user clicks too often: wait {ms} ms")
    event, changed = click(server, "unlike" if arguments.unlike else "like", arguments.kind, target_id, user_id)
    print(json.dumps({**event, "changed": changed}))


if __name__ == "__main__":
    sys.exit(main())
