"""Publishes and reads with asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence
from urllib.parse import quote

import redis.asyncio
from redis.exceptions import RedisError

from .counters import Answer, read_error
from .errors import Event
from .events import Id
from .sender import Sender
from .settings import Base, all_of, as_given, board_query, one_of
from .writers import close


class AsyncTallyd(Base):
    __doc__ = f"Publishes and reads with asyncio. A client belongs to the event loop that uses it first.\n\n{Base.__doc__}"

    _sender: Optional[Sender] = None
    _redis: Any = None

    async def __aenter__(self) -> AsyncTallyd:
        if self._amqp_url is not None:
            self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._sender is not None:
            await self._sender.close()
        if self._redis is not None:
            await close(self._redis)
        if self._gateway is not None:
            self._gateway.close()

    # ------------------------------------------------------------------ publishing

    async def like(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        return await self._publish(self._click("like", kind, target_id, user_id, at))

    async def unlike(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        return await self._publish(self._click("unlike", kind, target_id, user_id, at))

    async def count(
        self, kind: str, target_id: Id, metric: str, delta: int = 1, *, event_id: Optional[str] = None, at: Optional[int] = None
    ) -> Event:
        return await self._publish(self._change("count", kind, target_id, metric, at, delta=delta, event_id=event_id))

    async def set(self, kind: str, target_id: Id, metric: str, value: int, *, at: Optional[int] = None) -> Event:
        return await self._publish(self._change("set", kind, target_id, metric, at, value=value))

    async def reset(self, kind: str, target_id: Id, metric: str, *, at: Optional[int] = None) -> Event:
        return await self._publish(self._change("reset", kind, target_id, metric, at))

    async def publish(self, event: Mapping[str, Any]) -> Event:
        """Publishes an event again, for instance the event of an error."""
        return await self._publish(self._again(event))

    async def publish_many(self, events: Iterable[Mapping[str, Any]]) -> List[Event]:
        """Publishes events together, each as one message. An event without `at` gets the current time. A count without `event_id`
        gets a new id."""
        known = self._many(events)
        return all_of(await self._connected().publish(known, self._traceparent()))

    async def _publish(self, event: Event) -> Event:
        return one_of(await self._connected().publish([event], self._traceparent()))

    def _connected(self) -> Sender:
        self._may_publish()
        if self._sender is None:
            self._sender = self._new_sender()
        return self._sender

    # ------------------------------------------------------------------ reading

    async def counts(self, kind: str, target_ids: Iterable[Id], metric: str = "like") -> Dict[Id, Optional[int]]:
        """Reads the number of each target. `None` means that the number is unknown, not zero."""
        kind, given, ids = self._asked(kind, target_ids)
        metric = self._metric(metric)
        if not ids:
            return {}
        if self._gateway is not None:
            return as_given(given, ids, await asyncio.to_thread(self._gateway.counters, kind, ids, metric))
        # Shield the command from cancellation. Otherwise the next command on this connection would get the cancelled
        # command's answer.
        return as_given(given, ids, await asyncio.shield(self._from_redis(kind, ids, metric)))

    async def _from_redis(self, kind: str, ids: Sequence[str], metric: str) -> Dict[str, Optional[int]]:
        if self._redis_url is None:
            raise ValueError("no server to read from: pass redis_url or gateway")
        if self._redis is None:
            timeouts: Dict[str, Any] = {"socket_timeout": self._deadline_s, "socket_connect_timeout": self._deadline_s}
            self._redis = redis.asyncio.Redis.from_url(self._redis_url, **timeouts)
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for key, field in self._layout.fetches(kind, ids):
                pipeline.hmget(key, ["_", field])
            answers: List[Answer] = await pipeline.execute()
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise read_error(error) from error
        found, missing = self._layout.numbers(kind, metric, ids, answers)
        if missing:
            try:
                # The daemon then loads the noted buckets.
                await self._redis.sadd(self._layout.missing, *missing)
            except (RedisError, OSError, asyncio.TimeoutError):
                # Reading must not fail if this write fails, for instance on a replica.
                pass
        return found

    async def liked(self, kind: str, target_ids: Iterable[Id], user_id: Id) -> Dict[Id, bool]:
        """Reads whether the user likes each target. Needs the gateway."""
        kind, given, ids = self._asked(kind, target_ids)
        user = self._user(user_id)
        return as_given(given, ids, await asyncio.to_thread(self._needs_gateway().likes, kind, ids, user))

    async def board(
        self, name: str, period: Optional[str] = None, *, top: int = 100, around: Optional[Id] = None, radius: Optional[int] = None
    ) -> Dict[str, Any]:
        """Reads a board's members with rank and score. Needs the gateway."""
        query = board_query(period, top, around, radius)
        answer: Dict[str, Any] = await asyncio.to_thread(self._needs_gateway().get, f"/v1/boards/{quote(name, safe='')}", query)
        return answer
