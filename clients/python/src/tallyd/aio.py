"""The client for asyncio."""

from __future__ import annotations

import asyncio
from typing import Any, Dict, Iterable, List, Mapping, Optional, Sequence
from urllib.parse import quote

import redis.asyncio
from redis.exceptions import RedisError

from .counters import Answer
from .errors import Event, ReadError
from .events import Id
from .publisher import Publisher
from .settings import Base, as_given, board_query


class AsyncTallyd(Base):
    __doc__ = f"The client for asyncio. It belongs to the event loop that uses it first.\n\n{Base.__doc__}"

    _publisher: Optional[Publisher] = None
    _redis: Any = None
    _is_closed = False

    async def __aenter__(self) -> AsyncTallyd:
        if self._amqp_url is not None:
            self._connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._is_closed = True
        if self._publisher is not None:
            await self._publisher.close()
        if self._redis is not None:
            # Before redis-py 5 it was called close.
            await getattr(self._redis, "aclose", self._redis.close)()
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
        """Publishes an event again, for instance that of an error."""
        return await self._publish(self._again(event))

    async def _publish(self, event: Event) -> Event:
        event, routing_key, body = self._message(event)
        await self._connect().publish(event, routing_key, body)
        return event

    def _connect(self) -> Publisher:
        if self._is_closed:
            raise RuntimeError("the client is closed: make another one")
        if self._amqp_url is None:
            raise ValueError("only RabbitMQ takes events: pass amqp_url")
        if self._publisher is None:
            self._publisher = Publisher(self._amqp_url, self._exchange, **self._publisher_settings)
        return self._publisher

    # ------------------------------------------------------------------ reading

    async def counts(self, kind: str, target_ids: Iterable[Id], metric: str = "like") -> Dict[Id, Optional[int]]:
        """The number of each target; None where it is unknown, which is not zero."""
        kind, given, ids = self._asked(kind, target_ids)
        metric = self._metric(metric)
        if not ids:
            return {}
        if self._gateway is not None:
            return as_given(given, ids, await asyncio.to_thread(self._gateway.counters, kind, ids, metric))
        # A command that is cancelled halfway would leave its answer to the connection's next user.
        return as_given(given, ids, await asyncio.shield(self._from_redis(kind, ids, metric)))

    async def _from_redis(self, kind: str, ids: Sequence[str], metric: str) -> Dict[str, Optional[int]]:
        if self._redis_url is None:
            raise ValueError("nothing to read from: pass redis_url or gateway")
        if self._redis is None:
            timeouts: Dict[str, Any] = {"socket_timeout": self._deadline_s, "socket_connect_timeout": self._deadline_s}
            self._redis = redis.asyncio.Redis.from_url(self._redis_url, **timeouts)
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for key, field in self._layout.fetches(kind, ids):
                pipeline.hmget(key, ["_", field])
            answers: List[Answer] = await pipeline.execute()
        except (RedisError, OSError, asyncio.TimeoutError) as error:
            raise ReadError(f"Redis did not answer ({error}): treat the numbers as unknown, and check that it runs") from error
        found, missing = self._layout.numbers(kind, metric, ids, answers)
        if missing:
            try:
                # The daemon loads them then.
                await self._redis.sadd(self._layout.missing, *missing)
            except (RedisError, OSError, asyncio.TimeoutError):
                # Reading must not fail for it, for instance on a replica.
                pass
        return found

    async def liked(self, kind: str, target_ids: Iterable[Id], user_id: Id) -> Dict[Id, bool]:
        """Whether the user likes each target. Through the gateway alone."""
        kind, given, ids = self._asked(kind, target_ids)
        user = self._user(user_id)
        return as_given(given, ids, await asyncio.to_thread(self._needs_gateway().likes, kind, ids, user))

    async def board(
        self, name: str, period: Optional[str] = None, *, top: int = 100, around: Optional[Id] = None, radius: Optional[int] = None
    ) -> Dict[str, Any]:
        """A board's members with rank and score. Through the gateway alone."""
        query = board_query(period, top, around, radius)
        answer: Dict[str, Any] = await asyncio.to_thread(self._needs_gateway().get, f"/v1/boards/{quote(name, safe='')}", query)
        return answer
