"""What both classes share: the settings, and events from arguments."""

from __future__ import annotations

import threading
import uuid
from typing import Any, Collection, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from .counters import Layout
from .errors import Event, RefusedError
from .events import Clock, Id, a_name, an_id, body_of, checked, routing_key_of
from .gateway import Gateway


class Base:
    """All settings have the daemon's defaults. They must be as in its config.toml.

    amqp_url      RabbitMQ, for publishing; None for a client that only reads
    redis_url     Redis, for reading numbers
    gateway       URL of `tallyd gateway`, which reads in place of Redis: http://, https:// or unix:///path
    token         the gateway's token
    prefix        [amqp] prefix
    partition_by  [amqp] partition_by: "user" or "target"
    key_prefix    [redis] key_prefix
    bucket_bits   [redis] bucket_bits
    metrics       [metrics]: names and codes, for reading from Redis. Names that are not in it are refused; None allows all
    kinds         [kinds]: names. Others are refused; None allows all
    deadline_s    how long a call can take
    heartbeat_s   [amqp] heartbeat_s
    in_flight_max events without a confirm at one time; further calls wait
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
        key_prefix: str = "",
        bucket_bits: int = 13,
        metrics: Optional[Mapping[str, int]] = None,
        kinds: Optional[Iterable[str]] = None,
        deadline_s: float = 5.0,
        heartbeat_s: int = 5,
        in_flight_max: int = 1_000,
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
        """An event that was made before: with a new `at` it would be another one."""
        return checked(event, self._kinds, self._metrics)

    def _message(self, event: Event) -> Tuple[Event, str, bytes]:
        return event, routing_key_of(event, self._partition_by), body_of(event)

    # ------------------------------------------------------------------ reading

    def _asked(self, kind: str, target_ids: Iterable[Id]) -> Tuple[str, List[Id], List[str]]:
        given = list(target_ids)
        return a_name(kind, "kind", self._kinds), given, [an_id(target_id) for target_id in given]

    def _user(self, user_id: Id) -> str:
        return an_id(user_id, "user_id")

    def _metric(self, metric: str) -> str:
        if self._gateway is None and metric not in self._layout.metrics:
            raise RefusedError("unknown-metric", f"the code of {metric!r} is not known: pass metrics={{'like': 1, {metric!r}: CODE}}")
        return metric

    def _needs_gateway(self) -> Gateway:
        if self._gateway is None:
            raise ValueError("only the gateway can read this: pass gateway=URL")
        return self._gateway


def as_given(given: Sequence[Id], ids: Sequence[str], found: Mapping[str, Any]) -> Dict[Id, Any]:
    """What was found, by the ids as the caller wrote them."""
    return {key: found.get(target_id) for key, target_id in zip(given, ids)}


def board_query(period: Optional[str], top: int, around: Optional[Id], radius: Optional[int]) -> Dict[str, Any]:
    asked = {"period": period, "top": top, "around": around, "radius": radius}
    return {name: value for name, value in asked.items() if value is not None}
