"""The settings that both clients take."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

from redis.connection import parse_url

from .events import Clock
from .gateway import Gateway


class Base:
    """A client needs only the addresses of servers. It reads the site's settings from Redis, where the daemons keep them. Without Redis it
    publishes with the daemon's default settings.

    amqp_url      RabbitMQ, for publishing. Without it the gateway publishes
    redis_url     Redis or a node of a Redis Cluster, for reading the site's settings and numbers
    gateway       URL of `tallyd gateway`: http://, https:// or unix:///path. It replaces Redis for reading numbers
    token         the gateway's token
    key_prefix    [redis] key_prefix
    deadline_s    the timeout of a call
    heartbeat_s   [amqp] heartbeat_s
    in_flight_max the most events in flight, without a confirm. Further calls wait
    group_ms      the minimum time between two lists of events. Events of calls meanwhile wait for this time at most, and then go as one
                  list of up to 100 events. An event after a longer pause goes at once. 0: only calls of one turn of the event loop go
                  together. By default 2
    traceparent   called for each publish, with the caller's context variables but not in its thread. Returns the `traceparent` of the
                  events (W3C Trace Context), or `None` for none. Another value is ignored
    """

    def __init__(
        self,
        amqp_url: Optional[str] = None,
        redis_url: Optional[str] = None,
        gateway: Optional[str] = None,
        *,
        token: Optional[str] = None,
        key_prefix: str = "tally:",
        deadline_s: float = 5.0,
        heartbeat_s: int = 5,
        in_flight_max: int = 1_000,
        group_ms: float = 2.0,
        traceparent: Callable[[], Optional[str]] = lambda: None,
    ) -> None:
        if deadline_s <= 0:
            raise ValueError(f"deadline_s is {deadline_s!r}, allowed is a number above 0")
        if not 0 <= group_ms < deadline_s * 1_000:
            raise ValueError(f"group_ms is {group_ms!r}, allowed is a number from 0 to below the deadline")
        if redis_url is not None:
            # A wrong URL raises ValueError here, not in the first call.
            parse_url(redis_url)
        self._amqp_url = amqp_url
        self._redis_url = redis_url
        self._connection: Dict[str, Any] = {"deadline_s": deadline_s, "heartbeat_s": heartbeat_s, "in_flight_max": in_flight_max}
        self._connection["group_ms"] = group_ms
        self._settings: Dict[str, Any] = {"token": token, "key_prefix": key_prefix, "traceparent": traceparent, **self._connection}
        self._settings.update(amqp_url=amqp_url, redis_url=redis_url, gateway=gateway)
        self._gateway = None if gateway is None else Gateway(gateway, token, deadline_s)
        self._clock = Clock()
        self._is_closed = False

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed: create another one")
