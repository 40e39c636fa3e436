"""The client for threads.

It is the client for asyncio, in a loop that runs in its own thread. The thread sends heartbeats and receives confirms while the callers
do something else.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import threading
from typing import TYPE_CHECKING, Any, Callable, Coroutine, Iterable, Mapping, Optional, TypeVar

from .aio import AsyncTallyd
from .publisher import CLOSE_S
from .settings import Base

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    P = ParamSpec("P")
T = TypeVar("T")


class _Thread:
    """An event loop in a thread, and the client in it. A fork does not copy threads, so each process has its own."""

    def __init__(self, site: AsyncTallyd, deadline_s: float, of_parent: Optional[_Thread]) -> None:
        self.pid = os.getpid()
        # Its connections belong to the parent process. If Python freed them here, it could close the parent's.
        self._of_parent = of_parent
        self._site = site
        self._close_max_s = deadline_s + CLOSE_S
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tallyd", daemon=True)
        self._thread.start()

    def start(self, call: Callable[[AsyncTallyd], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(call(self._site), self._loop)

    def close(self) -> None:
        self.start(self._end).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, site: AsyncTallyd) -> None:
        """Closes the client, and waits until all calls in flight have ended."""
        await site.close()
        calls = asyncio.all_tasks() - {asyncio.current_task()}
        if calls:
            _, late = await asyncio.wait(calls, timeout=self._close_max_s)
            for call in late:
                call.cancel()
            await asyncio.gather(*late, return_exceptions=True)


_lock = threading.Lock()


def _renew_lock() -> None:
    # Another thread may have held the lock when the process was forked.
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def _blocking(method: Callable[Concatenate[AsyncTallyd, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Tallyd, P], T]:
    """Returns the method for threads that calls a method for asyncio."""

    @functools.wraps(method)
    def call(site: Tallyd, *arguments: Any, **named: Any) -> T:
        # Iterate in the caller's thread: a lazy iterable can belong to it.
        given = [_listed(value) for value in arguments]
        options = {name: _listed(value) for name, value in named.items()}
        future = site._started(lambda inner: method(inner, *given, **options))
        try:
            return future.result()
        except BaseException:
            # If the caller stops waiting, for instance at KeyboardInterrupt, cancel the call.
            future.cancel()
            raise

    typed: Any = call
    return typed  # type: ignore[no-any-return]


def _listed(value: Any) -> Any:
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return list(value) if is_list else value


class Tallyd(Base):
    __doc__ = f"The client for threads. Threads can share a client, and a client can be created before a fork.\n\n{Base.__doc__}"

    _thread: Optional[_Thread] = None

    def __enter__(self) -> Tallyd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections. A call that waits for a confirm raises UnconfirmedError; through the gateway it first waits for the
        gateway's answer."""
        with _lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first and self._thread is not None and self._thread.pid == os.getpid():
            self._thread.close()

    def _started(self, call: Callable[[AsyncTallyd], Coroutine[Any, Any, T]]) -> concurrent.futures.Future[T]:
        with _lock:
            self._must_be_open()
            if self._thread is None or self._thread.pid != os.getpid():
                self._thread = _Thread(AsyncTallyd(**self._settings), self._connection["deadline_s"], self._thread)
            return self._thread.start(call)

    like = _blocking(AsyncTallyd.like)
    unlike = _blocking(AsyncTallyd.unlike)
    count = _blocking(AsyncTallyd.count)
    set = _blocking(AsyncTallyd.set)
    reset = _blocking(AsyncTallyd.reset)
    publish = _blocking(AsyncTallyd.publish)
    publish_many = _blocking(AsyncTallyd.publish_many)
    counts = _blocking(AsyncTallyd.counts)
    liked = _blocking(AsyncTallyd.liked)
    board = _blocking(AsyncTallyd.board)
