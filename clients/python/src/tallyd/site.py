"""The client for threads.

Its sender is the one for asyncio, in a loop that runs in its own thread. The thread sends heartbeats and receives confirms
while the callers do something else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from typing import Any, Callable, Coroutine, Dict, Iterable, List, Mapping, Optional, Sequence, TypeVar
from urllib.parse import quote

import redis
from redis.exceptions import RedisError

from .counters import Answer, read_error
from .errors import Event
from .events import Id
from .publisher import CLOSE_S
from .sender import Sender
from .settings import Base, all_of, as_given, board_query, one_of

T = TypeVar("T")


class _Thread:
    """An event loop, and the sender in it. A fork does not copy threads, so each process has its own event loop."""

    def __init__(self, new_sender: Callable[[], Sender]) -> None:
        self.pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tallyd", daemon=True)
        self._thread.start()

        async def connect() -> Sender:
            return new_sender()

        self.sender = self.run(connect())

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            # If the caller stops waiting, for instance at KeyboardInterrupt, cancel the call.
            future.cancel()
            raise

    def close(self) -> None:
        try:
            asyncio.run_coroutine_threadsafe(self.sender.close(), self._loop).result(2 * CLOSE_S)
        except concurrent.futures.TimeoutError:
            pass
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class Tallyd(Base):
    __doc__ = f"The client for threads. Threads can share a client, and a client can be created before a fork.\n\n{Base.__doc__}"

    _thread: Optional[_Thread] = None
    _redis: Any = None

    def __enter__(self) -> Tallyd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._is_closed = True
        if self._thread is not None and self._thread.pid == os.getpid():
            self._thread.close()
        if self._redis is not None:
            self._redis.close()
        if self._gateway is not None:
            self._gateway.close()

    # ------------------------------------------------------------------ publishing

    def like(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        """Publishes a like. Returns the event when the broker has it on disk, in a queue."""
        return self._publish(self._click("like", kind, target_id, user_id, at))

    def unlike(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        return self._publish(self._click("unlike", kind, target_id, user_id, at))

    def count(
        self, kind: str, target_id: Id, metric: str, delta: int = 1, *, event_id: Optional[str] = None, at: Optional[int] = None
    ) -> Event:
        return self._publish(self._change("count", kind, target_id, metric, at, delta=delta, event_id=event_id))

    def set(self, kind: str, target_id: Id, metric: str, value: int, *, at: Optional[int] = None) -> Event:
        return self._publish(self._change("set", kind, target_id, metric, at, value=value))

    def reset(self, kind: str, target_id: Id, metric: str, *, at: Optional[int] = None) -> Event:
        return self._publish(self._change("reset", kind, target_id, metric, at))

    def publish(self, event: Mapping[str, Any]) -> Event:
        """Publishes an event again, for instance the event of an error."""
        return self._publish(self._again(event))

    def publish_many(self, events: Iterable[Mapping[str, Any]]) -> List[Event]:
        """Publishes events together, each as one message. An event without `at` gets the current time. A count without `event_id`
        gets a new id."""
        known = self._many(events)
        thread = self._connected()
        return all_of(thread.run(thread.sender.publish(known, self._traceparent())))

    def _publish(self, event: Event) -> Event:
        thread = self._connected()
        return one_of(thread.run(thread.sender.publish([event], self._traceparent())))

    def _connected(self) -> _Thread:
        self._may_publish()
        thread = self._thread
        if thread is not None and thread.pid == os.getpid():
            return thread
        if thread is not None:
            # Another thread may have held the lock when the process was forked.
            self._lock = threading.Lock()
        with self._lock:
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _Thread(self._new_sender)
            return self._thread

    # ------------------------------------------------------------------ reading

    def counts(self, kind: str, target_ids: Iterable[Id], metric: str = "like") -> Dict[Id, Optional[int]]:
        """Reads the number of each target. `None` means that the number is unknown, not zero."""
        kind, given, ids = self._asked(kind, target_ids)
        metric = self._metric(metric)
        if not ids:
            return {}
        if self._gateway is not None:
            return as_given(given, ids, self._gateway.counters(kind, ids, metric))
        return as_given(given, ids, self._from_redis(kind, ids, metric))

    def _from_redis(self, kind: str, ids: Sequence[str], metric: str) -> Dict[str, Optional[int]]:
        if self._redis_url is None:
            raise ValueError("no server to read from: pass redis_url or gateway")
        if self._redis is None:
            timeouts = {"socket_timeout": self._deadline_s, "socket_connect_timeout": self._deadline_s}
            self._redis = redis.Redis.from_url(self._redis_url, **timeouts)
        try:
            pipeline = self._redis.pipeline(transaction=False)
            for key, field in self._layout.fetches(kind, ids):
                pipeline.hmget(key, ["_", field])
            answers: List[Answer] = pipeline.execute()
        except (RedisError, OSError) as error:
            raise read_error(error) from error
        found, missing = self._layout.numbers(kind, metric, ids, answers)
        if missing:
            try:
                # The daemon then loads the noted buckets.
                self._redis.sadd(self._layout.missing, *missing)
            except (RedisError, OSError):
                # Reading must not fail if this write fails, for instance on a replica.
                pass
        return found

    def liked(self, kind: str, target_ids: Iterable[Id], user_id: Id) -> Dict[Id, bool]:
        """Reads whether the user likes each target. Needs the gateway."""
        kind, given, ids = self._asked(kind, target_ids)
        return as_given(given, ids, self._needs_gateway().likes(kind, ids, self._user(user_id)))

    def board(
        self, name: str, period: Optional[str] = None, *, top: int = 100, around: Optional[Id] = None, radius: Optional[int] = None
    ) -> Dict[str, Any]:
        """Reads a board's members with rank and score. Needs the gateway."""
        query = board_query(period, top, around, radius)
        answer: Dict[str, Any] = self._needs_gateway().get(f"/v1/boards/{quote(name, safe='')}", query)
        return answer
