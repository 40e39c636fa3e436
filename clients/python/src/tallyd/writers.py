"""Reads which numbers API servers count. Daemons announce it in Redis, and clients follow the announcement, so a site can change
it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any, FrozenSet, Optional, Union

import redis.asyncio
from redis.exceptions import RedisError

LOG = logging.getLogger("tallyd")

# The client uses an answer for at most this time.
EVERY_S = 10.0
# How long a publish waits for an answer.
READ_MAX_S = 0.5


class Writers:
    """Knows which numbers API servers count. The object belongs to one event loop."""

    def __init__(self, redis_url: str, key: str) -> None:
        self._redis_url = redis_url
        self._key = key
        # An older daemon announces nothing, and counts all numbers itself.
        self._by_api: FrozenSet[str] = frozenset()
        self._reading: Optional[asyncio.Task[None]] = None
        self._was_read = False
        self._due_at = 0.0

    async def by_api(self) -> FrozenSet[str]:
        """Returns the names of the numbers that API servers count. While Redis answers, the names are at most
        ten seconds old. Only one call asks Redis. Until Redis answers, other calls use the known names. If no names are
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
        return self._by_api

    async def _read(self) -> None:
        try:
            text = await asyncio.wait_for(self._text(), READ_MAX_S)
            self._by_api = announced(text, self._by_api)
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


def announced(text: Union[bytes, str, None], known: FrozenSet[str]) -> FrozenSet[str]:
    """Returns the names in an announcement such as {"api": ["video:like"]}. If the text does not have this form, returns
    `known`.
    """
    if text is None:
        return known
    answer = json.loads(text)
    numbers = answer.get("api") if isinstance(answer, dict) else None
    return frozenset(map(str, numbers)) if isinstance(numbers, list) else known


async def close(client: Any) -> None:
    # Before redis-py 5, the method was called close.
    await getattr(client, "aclose", client.close)()
