"""Reads the site card and numbers from Redis, or from a Redis Cluster."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Dict, List, Optional, Sequence, Tuple

import redis.asyncio
from redis.crc import key_slot
from redis.exceptions import AuthenticationError, MovedError, RedisError, ResponseError

from .card import Card, parsed
from .counters import Command, bucket_of, number_in, read_of
from .errors import ReadError

LOG = logging.getLogger("tallyd")

FAILURES = (RedisError, OSError, asyncio.TimeoutError)
CARD_EVERY_S = 60.0
# The pause after a read without a card.
CARD_AGAIN_S = 1.0
# How long a call waits for the card, and the first call, which has no card yet.
CARD_READ_MAX_S = 0.5
CARD_FIRST_MAX_S = 2.0
MISSING_KEPT_S = 3_600
# How often a command goes to the node that a Redis Cluster names.
MOVES_MAX = 5


class Reader:
    """Keeps the connections to Redis. A reader belongs to one event loop."""

    def __init__(self, url: str, key_prefix: str, timeout_s: float) -> None:
        timeouts: Dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
        self._first: Any = redis.asyncio.Redis.from_url(url, **timeouts)
        # The other nodes of a Redis Cluster. redis-py's own client for a Cluster needs more rights than the account has.
        self._nodes: Dict[Tuple[str, int], Any] = {}
        self._node_of_slot: Dict[int, Any] = {}
        self._key_prefix = key_prefix
        self._card = Card()
        self._card_error: Optional[BaseException] = None
        self._has_warned = False
        self._due_at = 0.0
        self._reading: Optional[asyncio.Future[None]] = None

    # ------------------------------------------------------------------ the card

    async def card(self) -> Card:
        """Returns the site's card, at most a minute old while Redis answers. If Redis has no card that can be read, returns the
        last one."""
        if self._reading is None or asyncio.get_running_loop().time() >= self._due_at:
            return await self.fresh_card()
        if self._card.kinds is None and not self._reading.done():
            await asyncio.wait([self._reading], timeout=CARD_READ_MAX_S)
        return self._card

    async def fresh_card(self) -> Card:
        """Reads the card now."""
        self._due_at = asyncio.get_running_loop().time() + CARD_EVERY_S
        limit = CARD_FIRST_MAX_S if self._reading is None else CARD_READ_MAX_S
        self._reading = reading = asyncio.ensure_future(self._read_card())
        # After the timeout the read continues, so its answer can't be taken for another command's.
        await asyncio.wait([reading], timeout=limit)
        return self._card

    async def _read_card(self) -> None:
        card, key = None, f"{self._key_prefix}c:site"
        # Silence counts as an error.
        self._card_error = asyncio.TimeoutError("no answer in time")
        try:
            (text,) = await self._ask([("GET", key)])
            card, self._card_error = parsed(text), None
        except FAILURES as error:
            self._card_error = error
        if card is not None:
            self._card, self._has_warned = card, False
            return
        self._due_at = asyncio.get_running_loop().time() + CARD_AGAIN_S
        if not self._has_warned:
            self._has_warned = True
            why = self._card_error or f"Redis has no card at {key} that this version can read"
            LOG.warning("The site card can't be read (%s). The client uses the last card, or publishes without checking names.", why)

    # ------------------------------------------------------------------ numbers

    async def counters(self, card: Card, kind: str, target_ids: Sequence[str], metric: str) -> Dict[str, Optional[int]]:
        """Reads the numbers. `None` means that a number is unknown. Raises ReadError if Redis does not answer."""
        if card.metrics is None:
            # Without a card the layout is unknown.
            if self._card_error is not None:
                raise _read_error(self._card_error) from self._card_error
            return dict.fromkeys(target_ids)
        try:
            answers = await self._ask([read_of(card, self._key_prefix, kind, metric, target_id) for target_id in target_ids])
        except FAILURES as error:
            raise _read_error(error) from error
        found: Dict[str, Optional[int]] = {}
        missing = set()
        for target_id, answer in zip(target_ids, answers):
            loaded, value = map(_text, answer)
            found[target_id] = number_in(card, kind, metric, loaded, value)
            if loaded is None:
                missing.add(bucket_of(card, kind, target_id))
        if missing:
            await self._note(sorted(missing))
        return found

    async def _note(self, buckets: Sequence[str]) -> None:
        """Notes the buckets that Redis has lost. A daemon then loads them."""
        key = f"{self._key_prefix}c:missing"
        try:
            await self._ask([("SADD", key, *buckets), ("EXPIRE", key, MISSING_KEPT_S)])
        except FAILURES as error:
            # Reading must not fail if this write fails, for instance on a replica.
            LOG.debug("note missing buckets: %r", error)

    # ------------------------------------------------------------------ connections

    async def _ask(self, commands: Sequence[Command]) -> List[Any]:
        """Sends the commands together, and returns their answers. Each command's second part is its key, or a script."""
        answers: List[Any] = [None] * len(commands)
        left: List[int] = list(range(len(commands)))
        for _ in range(MOVES_MAX):
            by_node: Dict[Any, List[int]] = {}
            for place in left:
                by_node.setdefault(self._node_for(str(commands[place][1])), []).append(place)
            try:
                await asyncio.gather(*(_piped(node, commands, places, answers) for node, places in by_node.items()))
            except FAILURES:
                # Perhaps another node has taken over. The first node names it.
                self._node_of_slot.clear()
                raise
            left = [place for place in left if isinstance(answers[place], MovedError)]
            for place in left:
                self._move(answers[place])
            if not left:
                break
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _node_for(self, key: str) -> Any:
        return self._node_of_slot.get(key_slot(key.encode()), self._first) if self._node_of_slot else self._first

    def _move(self, moved: MovedError) -> None:
        address = (moved.host, int(moved.port))
        if address not in self._nodes:
            pool = self._first.connection_pool
            settings = {**pool.connection_kwargs, "port": address[1]}
            # A node that does not know its address names none. It is the first node's.
            settings["host"] = moved.host or settings["host"]
            others = redis.asyncio.ConnectionPool(connection_class=pool.connection_class, **settings)
            self._nodes[address] = redis.asyncio.Redis(connection_pool=others)
        self._node_of_slot[int(moved.slot_id)] = self._nodes[address]

    async def close(self) -> None:
        """Closes the connections. Reads in flight fail."""
        # Such a read is no outage.
        self._has_warned = True
        for node in (self._first, *self._nodes.values()):
            await node.connection_pool.disconnect()


async def _piped(node: Any, commands: Sequence[Command], places: Sequence[int], answers: List[Any]) -> None:
    pipeline = node.pipeline(transaction=False)
    for place in places:
        pipeline.execute_command(*commands[place])
    for place, answer in zip(places, await pipeline.execute(raise_on_error=False)):
        # redis-py 4 does not parse this error outside of its client for a Cluster.
        is_moved = isinstance(answer, ResponseError) and str(answer).startswith("MOVED ")
        answers[place] = MovedError(str(answer)[len("MOVED ") :]) if is_moved else answer


def _text(value: Any) -> Optional[str]:
    return value.decode() if isinstance(value, bytes) else value


def _read_error(error: BaseException) -> ReadError:
    # Older versions of redis-py have no class for WRONGPASS.
    if isinstance(error, AuthenticationError) or str(error).startswith("WRONGPASS"):
        return ReadError(f"Redis refused the login ({error}): treat the numbers as unknown, and check user and password in `redis_url`")
    return ReadError(f"Redis did not answer ({error}): treat the numbers as unknown, and check that Redis runs")
