"""The code that Tallyd and AsyncTallyd share: reads the settings, and makes events from arguments."""

from __future__ import annotations

import threading
import uuid
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from .counters import Layout
from .errors import Event, PublishManyError, RefusedError, TallydError
from .events import Clock, Id, a_name, an_id, checked
from .gateway import Gateway
from .publisher import Publisher
from .sender import Result, Sender
from .writers import Writers


class Base:
    """All settings have the daemon's defaults. They must equal the daemon's config.toml.

    amqp_url      RabbitMQ, for publishing. Without it the gateway publishes
    redis_url     Redis, for reading numbers, and for reading which numbers API servers count
    gateway       URL of `tallyd gateway`: http://, https:// or unix:///path. It replaces Redis for reading, and counts the numbers of API servers
    token         the gateway's token
    prefix        [amqp] prefix
    partition_by  [amqp] partition_by: "user" or "target"
    key_prefix    [redis] key_prefix
    bucket_bits   [redis] bucket_bits
    metrics       [metrics]: names and codes, for reading from Redis. Other names are refused. `None` allows all names
    kinds         [kinds]: names. Other names are refused. `None` allows all names
    deadline_s    the timeout of a call
    heartbeat_s   [amqp] heartbeat_s
    in_flight_max the most events in flight, without a confirm. Further calls wait
    traceparent   called for each publish. Returns the header `traceparent` (W3C Trace Context) of the messages, or `None` for no header
    """

    def __init__(
        self,
        amqp_url: Optional[str] = None,
        redis_url: Optional[str] = None,
        gateway: Optional[str] = None,
        *,
        token: Optional[str] = None,
        prefix: str = "tally",
        partition_by: str = "user",
        key_prefix: str = "tally:",
        bucket_bits: int = 13,
        metrics: Optional[Mapping[str, int]] = None,
        kinds: Optional[Iterable[str]] = None,
        deadline_s: float = 5.0,
        heartbeat_s: int = 5,
        in_flight_max: int = 1_000,
        traceparent: Callable[[], Optional[str]] = lambda: None,
    ) -> None:
        if partition_by not in ("user", "target"):
            raise ValueError(f"partition_by is {partition_by!r}, allowed are 'user' and 'target'")
        if deadline_s <= 0:
            raise ValueError(f"deadline_s is {deadline_s!r}, allowed is a number above 0")
        self._amqp_url = amqp_url
        self._redis_url = redis_url
        self._deadline_s = deadline_s
        self._publisher_settings: Dict[str, Any] = {
            "deadline_s": deadline_s,
            "heartbeat_s": heartbeat_s,
            "in_flight_max": in_flight_max,
        }
        self._exchange = f"{prefix}.events"
        self._partition_by = partition_by
        self._layout = Layout(key_prefix, bucket_bits, {"like": 1, **(metrics or {})})
        self._metrics: Optional[Collection[str]] = None if metrics is None else list(metrics)
        self._kinds: Optional[Collection[str]] = None if kinds is None else list(kinds)
        self._clock = Clock()
        self._lock = threading.Lock()
        self._gateway = None if gateway is None else Gateway(gateway, token, deadline_s)
        self._traceparent = traceparent
        self._is_closed = False

    # ------------------------------------------------------------------ events

    def _click(self, event_type: str, kind: str, target_id: Id, user_id: Id, at: Optional[int]) -> Event:
        return self._checked({"type": event_type, "kind": kind, "target_id": target_id, "user_id": user_id, "at": at})

    def _change(self, event_type: str, kind: str, target_id: Id, metric: str, at: Optional[int], **fields: Any) -> Event:
        if "event_id" in fields and fields["event_id"] is None:
            fields["event_id"] = str(uuid.uuid4())
        return self._checked({"type": event_type, "kind": kind, "target_id": target_id, "metric": metric, **fields, "at": at})

    def _checked(self, event: Mapping[str, Any]) -> Event:
        at = self._clock.at() if event.get("at") is None else event["at"]
        return checked({**event, "at": at}, self._kinds, self._metrics)

    def _again(self, event: Mapping[str, Any]) -> Event:
        """Checks an event that is published again. The event keeps its `at`, because with a new `at` it would be another event."""
        return checked(event, self._kinds, self._metrics)

    def _many(self, events: Iterable[Mapping[str, Any]]) -> List[Event]:
        """Adds missing fields to events and checks all events, before any event is sent."""
        checked_events: List[Event] = []
        for event in events:
            if event.get("type") == "count" and event.get("event_id") is None:
                event = {**event, "event_id": str(uuid.uuid4())}
            try:
                checked_events.append(self._checked(event))
            except RefusedError as error:
                raise RefusedError(error.reason, f"event {len(checked_events)} of the list: {error.problem}") from None
        return checked_events

    def _may_publish(self) -> None:
        if self._is_closed:
            raise RuntimeError("the client is closed: create another one")
        if self._amqp_url is None and self._gateway is None:
            raise ValueError("no server to publish to: pass amqp_url or gateway")

    def _new_sender(self) -> Sender:
        publisher = None if self._amqp_url is None else Publisher(self._amqp_url, self._exchange, **self._publisher_settings)
        writers = None if self._redis_url is None else Writers(self._redis_url, f"{self._layout.key_prefix}c:writers")
        return Sender(publisher, self._gateway, writers, self._partition_by, self._deadline_s)

    # ------------------------------------------------------------------ reading

    def _asked(self, kind: str, target_ids: Iterable[Id]) -> Tuple[str, List[Id], List[str]]:
        given = list(target_ids)
        return a_name(kind, "kind", self._kinds), given, [an_id(target_id) for target_id in given]

    def _user(self, user_id: Id) -> str:
        return an_id(user_id, "user_id")

    def _metric(self, metric: str) -> str:
        if self._gateway is None and metric not in self._layout.metrics:
            raise RefusedError("unknown-metric", f"the code of {metric!r} is unknown: pass metrics={{'like': 1, {metric!r}: CODE}}")
        return metric

    def _needs_gateway(self) -> Gateway:
        if self._gateway is None:
            raise ValueError("only the gateway can read this: pass gateway=URL")
        return self._gateway


def one_of(results: Sequence[Result]) -> Event:
    (result,) = results
    if isinstance(result, TallydError):
        raise result
    return result


def all_of(results: Sequence[Result]) -> List[Event]:
    events = [result for result in results if not isinstance(result, TallydError)]
    if len(events) < len(results):
        raise PublishManyError(results)
    return events


def as_given(given: Sequence[Id], ids: Sequence[str], found: Mapping[str, Any]) -> Dict[Id, Any]:
    """Returns the found values, with the ids as the caller passed them."""
    return {key: found.get(target_id) for key, target_id in zip(given, ids)}


def board_query(period: Optional[str], top: int, around: Optional[Id], radius: Optional[int]) -> Dict[str, Any]:
    asked = {"period": period, "top": top, "around": around, "radius": radius}
    return {name: value for name, value in asked.items() if value is not None}
