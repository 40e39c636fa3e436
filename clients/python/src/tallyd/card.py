"""The site card: the site's settings, which the daemons write to Redis."""

from __future__ import annotations

import json
from typing import FrozenSet, Mapping, NamedTuple, Optional, Union

VERSION = 1
FORMS = ("packed", "entity", "string")
# A refusal for one of these reasons can come from an outdated card.
REASONS = ("unknown-kind", "unknown-metric", "not-settable", "counted-by-api", "at-too-early")


class Card(NamedTuple):
    """The site's settings. `Card()` has the daemon's defaults, and allows all names: RabbitMQ and the daemon decide."""

    kinds: Optional[Mapping[str, int]] = None
    metrics: Optional[Mapping[str, int]] = None
    # Names of numbers, such as video:like.
    api: FrozenSet[str] = frozenset()
    settable: Optional[FrozenSet[str]] = None
    below_zero: FrozenSet[str] = frozenset()
    exchange: str = "tally.events"
    partition_by: str = "user"
    at_min_s: int = 1262304000
    form: str = "packed"
    bucket_bits: int = 13
    counter_key: str = ""


def parsed(text: Union[bytes, str, None]) -> Optional[Card]:
    """Returns the card, or `None` if there is none that this version can read."""
    try:
        card = json.loads(text or "null")
        layout = card["layout"]
        if card["version"] != VERSION or layout["form"] not in FORMS:
            return None
        return Card(
            kinds=dict(card["kinds"]),
            metrics=dict(card["metrics"]),
            api=frozenset(card["api"]),
            settable=frozenset(card["settable"]),
            below_zero=frozenset(card["below_zero"]),
            exchange=card["exchange"],
            partition_by=card["partition_by"],
            at_min_s=int(card["at_min_s"]),
            form=layout["form"],
            bucket_bits=layout["bucket_bits"],
            counter_key=layout.get("counter_key", ""),
        )
    except (KeyError, TypeError, ValueError):
        return None
