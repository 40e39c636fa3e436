"""Reads which numbers API servers count. Daemons announce it in Redis, and clients follow the announcement, so a site can change
it."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any, FrozenSet, NamedTuple, Optional, Union

import redis.asyncio
from redis.exceptions import RedisError

LOG = logging.getLogger("tallyd")

# The client uses an answer for at most this time.
EVERY_S = 10.0
# How long a publish waits for an answer.
READ_MAX_S = 0.5


class Announced(NamedTuple):
    """An announcement. During a change, all clients change at the same instant."""

    by_api: FrozenSet[str] = frozenset()
    # The names from `from_us` on (in microseconds since the epoch). It is None if no change is announced.
    next_by_api: Optional[FrozenSet[str]] = None
    from_us: int = 0

    def at(self, now_us: int) -> FrozenSet[str]:
        """Returns the names of the numbers that API servers count at an instant."""
        if self.next_by_api is not None and now_us >= self.from_us:
            return self.next_by_api
        return self.by_api


class Writers:
    """Knows which numbers API servers count. The object belongs to one event loop."""

    def __init__(self, redis_url: str, key: str) -> None:
        self._redis_url = redis_url
        self._key = key
        # An older daemon announces nothing, and counts all numbers itself.
        self._known = Announced()
        self._reading: Optional[asyncio.Task[None]] = None
        self._was_read = False
        self._due_at = 0.0

    async def by_api(self) -> FrozenSet[str]:
        """Returns the names of the numbers that API servers count. While Redis answers, the announcement is at most
        ten seconds old. Only one call asks Redis. Until Redis answers, other calls use the known announcement. If none is
        known, these calls wait."""
        now = asyncio.get_running_loop().time()
        reading = self._reading
        is_due = reading is None or now >= self._due_at
        if reading is None or is_due:
            self._due_at = now + EVERY_S
            reading = self._reading = asyncio.ensure_future(self._read())
        if is_due or not self._was_read:
            # If this call is cancelled, other calls still need the answer.
            await asyncio.shield(reading)
        return self._known.at(time.time_ns() // 1_000)

    async def _read(self) -> None:
        try:
            text = await asyncio.wait_for(self._text(), READ_MAX_S)
            self._known = announced(text, self._known)
        except (RedisError, OSError, asyncio.TimeoutError, ValueError) as error:
            LOG.debug("read %s: %r", self._key, error)
        self._was_read = True

    async def _text(self) -> Union[bytes, str, None]:
        # Use a new connection for each read, so that a cancelled read never leaves its answer for the next read.
        client: Any = redis.asyncio.Redis.from_url(self._redis_url)
        try:
            text: Union[bytes, str, None] = await client.get(self._key)
            return text
        finally:
            await close(client)

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


def announced(text: Union[bytes, str, None], known: Announced) -> Announced:
    """Reads an announcement such as {"api": ["video:like"]}. If the text does not have this form, returns `known`."""
    answer = None if text is None else json.loads(text)
    if not isinstance(answer, dict) or not isinstance(answer.get("api"), list):
        return known
    by_api = frozenset(map(str, answer["api"]))
    following, from_us = answer.get("next"), answer.get("from")
    if isinstance(following, list) and isinstance(from_us, int):
        return Announced(by_api, frozenset(map(str, following)), from_us)
    return Announced(by_api)


async def close(client: Any) -> None:
    # Before redis-py 5, the method was called close.
    await getattr(client, "aclose", client.close)()
