"""Joins the events of concurrent calls to lists: a message and a confirm of its own would cost the broker more than all other work on
an event."""

from __future__ import annotations

import asyncio
from typing import Awaitable, Callable, List, NamedTuple, Optional, Set, Tuple

EVENTS_MAX = 100
BYTES_MAX = 256 * 1024


class Message(NamedTuple):
    exchange: str
    routing_key: str
    body: bytes
    traceparent: Optional[str]
    # The event must go to the partition of its own routing key.
    is_alone: bool = False


_Waiting = Tuple[Message, "asyncio.Future[None]"]


class Groups:
    """Calls `send` with the message of each list. An event goes at once if the last list went more than `group_s` ago. Otherwise it goes
    when that time is over, or when its list is full."""

    def __init__(self, group_s: float, send: Callable[[Message], Awaitable[None]]) -> None:
        self._loop = asyncio.get_running_loop()
        self._group_s = group_s
        self._send = send
        self._open: List[_Waiting] = []
        self._bytes = 0
        self._went_at = float("-inf")
        self._ends_at = 0.0
        self._timer: Optional[asyncio.Handle] = None
        # The loop keeps no reference to its tasks.
        self._tasks: Set[asyncio.Task[None]] = set()

    def add(self, message: Message, ends_at: float) -> asyncio.Future[None]:
        """Returns a future that ends when the broker has the event on disk. `ends_at` is the deadline on the event loop's clock."""
        done: asyncio.Future[None] = self._loop.create_future()
        if message.is_alone:
            self._start([(message, done)], ends_at)
            return done
        is_other = bool(self._open) and self._open[0][0].exchange != message.exchange
        if is_other or self._bytes + len(message.body) > BYTES_MAX:
            self.flush()
        self._ends_at = max(self._ends_at, ends_at) if self._open else ends_at
        self._open.append((message, done))
        self._bytes += len(message.body)
        if len(self._open) == EVENTS_MAX:
            self.flush()
        elif self._timer is None:
            # A time that is over is the next turn of the event loop: calls of one turn go together.
            self._timer = self._loop.call_at(max(self._went_at + self._group_s, self._loop.time()), self.flush)
        return done

    def flush(self) -> None:
        """Sends what waits."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._open:
            waiting, self._open, self._bytes = self._open, [], 0
            self._went_at = self._loop.time()
            self._start(waiting, self._ends_at)

    def _start(self, waiting: List[_Waiting], ends_at: float) -> None:
        task = self._loop.create_task(self._sent(waiting))
        self._tasks.add(task)
        # The last deadline of the calls. Each call also has a timer of its own.
        timer = self._loop.call_at(ends_at, task.cancel)
        task.add_done_callback(lambda ended: (self._tasks.discard(ended), timer.cancel()))

    async def _sent(self, waiting: List[_Waiting]) -> None:
        error: Optional[Exception] = None
        try:
            await self._send(_joined([message for message, _ in waiting]))
        except Exception as failed:
            error = failed
        for _, done in waiting:
            if done.done():
                continue
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)


def _joined(messages: List[Message]) -> Message:
    """Returns the message of a list. A list of one event is this event. The first event's routing key is that of the list: tallyd takes
    each event from any partition."""
    first = messages[0]
    if len(messages) == 1:
        return first
    return first._replace(body=b"[" + b",".join(map(_traced, messages)) + b"]", traceparent=None)


def _traced(message: Message) -> bytes:
    """Returns the event's JSON. A list has only one header, so that the event itself keeps its trace, as its first field."""
    if message.traceparent is None:
        return message.body
    return b'{"traceparent":"' + message.traceparent.encode() + b'",' + message.body[1:]
