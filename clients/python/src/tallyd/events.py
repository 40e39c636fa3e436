"""Validates events by the rules of docs/events.md. The daemon rejects the same events, for the same reasons."""

from __future__ import annotations

import json
import re
import time
from typing import Any, Callable, Collection, Dict, Iterable, List, Mapping, Optional, Tuple, Union

from .card import Card
from .errors import Event, RefusedError

Id = Union[int, str]

ID_MAX = 2**63 - 1
AT_MAX = 253402300799999999
DELTA_MAX = 2**31
VALUE_MAX = 2**53
EVENT_ID_MAX = 64

# An id has only digits, no sign and no leading zero. So each id has only one spelling.
_DECIMAL = re.compile("[1-9][0-9]{0,18}")


def an_id(value: Any, field: str = "target_id") -> str:
    """Returns the id as text."""
    # Refuse bool, which is an int in Python.
    text = str(value) if type(value) is int else value
    if not isinstance(text, str) or not _DECIMAL.fullmatch(text) or int(text) > ID_MAX:
        reason = f"{field.replace('_', '-')}-out-of-range"
        raise RefusedError(reason, f"{field} is {value!r}, allowed is an integer or a decimal string, 1 to {ID_MAX}")
    return text


def a_name(value: Any, field: str, known: Optional[Collection[str]]) -> str:
    """Checks the name of a kind or a metric. Without a list of known names, any text is allowed."""
    if not _is_text(value) or (known is not None and value not in known):
        allowed = "non-empty text" if known is None else ", ".join(known)
        raise RefusedError(f"unknown-{field}", f"{field} is {value!r}, allowed is {allowed}")
    return str(value)


def _is_text(value: Any) -> bool:
    if not isinstance(value, str) or not value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(value: Any, field: str, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise RefusedError(f"{field}-out-of-range", f"{field} is {value!r}, allowed is an integer, {least} to {most}")
    return value


def checked(event: Mapping[str, Any], card: Card, is_new: bool = False) -> Event:
    """Checks an event against the site's card. Returns the event with only the fields that the daemon reads, in their usual order and
    form. `is_new` says that no script has counted the event: it is of a method such as `like`, or it came without `at`."""
    event_type = event.get("type")
    if event_type not in ("like", "unlike", "count", "set", "reset"):
        raise RefusedError("unknown-type", f"type is {event_type!r}, allowed are like, unlike, count, set and reset")
    result: Dict[str, Any] = {"type": event_type, "kind": a_name(event.get("kind"), "kind", card.kinds)}
    result["target_id"] = an_id(event.get("target_id"))
    if event_type in ("like", "unlike"):
        result["user_id"] = an_id(event.get("user_id"), "user_id")
    else:
        metric = a_name(event.get("metric"), "metric", card.metrics)
        if metric == "like":
            raise RefusedError("unknown-metric", "metric is 'like': call like() and unlike() instead")
        result["metric"] = metric
    if event_type in ("set", "reset") and card.settable is not None and number_of(result) not in card.settable:
        raise RefusedError("not-settable", f"no rule of the site makes {number_of(result)} settable")
    if event_type == "count":
        result["delta"] = _integer(event.get("delta"), "delta", -DELTA_MAX, DELTA_MAX)
        event_id = event.get("event_id")
        if not _is_text(event_id) or len(str(event_id)) > EVENT_ID_MAX:
            problem = f"event_id is {event_id!r}, allowed is text of 1 to {EVENT_ID_MAX} characters"
            raise RefusedError("event-id-out-of-range", problem)
        result["event_id"] = event_id
    if event_type == "set":
        result["value"] = _integer(event.get("value"), "value", -VALUE_MAX, VALUE_MAX)
    result["at"] = _integer(event.get("at"), "at", 1, AT_MAX)
    if result["at"] < card.at_min_s * 1_000_000:
        problem = f"at is {result['at']}, which is before the site's earliest time ({card.at_min_s} s since 1970): write microseconds since 1970"
        raise RefusedError("at-too-early", problem)
    if is_new and number_of(result) in card.api:
        problem = f"API servers count {number_of(result)}: call the script in docs/scripts.md, then publish the event with the script's `at`"
        raise RefusedError("counted-by-api", problem)
    return result


def checked_list(given: Iterable[Tuple[Mapping[str, Any], bool]], card: Card) -> List[Event]:
    """Checks all events of a list, each with its `is_new`, before any event is sent."""
    known: List[Event] = []
    for event, is_new in given:
        try:
            known.append(checked(event, card, is_new))
        except RefusedError as error:
            raise RefusedError(error.reason, f"event {len(known)} of the list: {error.problem}") from None
    return known


def body_of(event: Event) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def number_of(event: Event) -> str:
    """Returns the name of the number that the event changes, for instance video:like."""
    return f"{event['kind']}:{event.get('metric', 'like')}"


def routing_key_of(event: Event, partition_by: str) -> str:
    return str(event["user_id"] if partition_by == "user" and "user_id" in event else event["target_id"])


class Clock:
    """Returns the time in microseconds since 1970. Each call returns a later time, even if the clock goes back a little."""

    def __init__(self, now: Callable[[], int] = lambda: time.time_ns() // 1_000) -> None:
        self._now = now
        self._last = 0

    def at(self) -> int:
        now = self._now()
        # If the clock has gone back by a second or more, somebody corrected the clock: use the corrected time.
        if 0 <= self._last - now < 1_000_000:
            now = self._last + 1
        self._last = now
        return now
