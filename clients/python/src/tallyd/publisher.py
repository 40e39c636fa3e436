"""Publishes over one long-lived connection.

An outer loop keeps a session. When the session ends, the loop connects again. A session is one connection with one
channel in confirm mode. Publishing waits for a session, sends the message and waits for its confirm. If the session
ends before the confirm, the same body is sent in the next session. This repeats until the deadline.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any, Dict, List, Optional

import pika
from pika.adapters.asyncio_connection import AsyncioConnection
from pika.exceptions import ChannelClosedByBroker

from .errors import Event, LoginError, NackedError, RejectedError, ReturnedError, UnconfirmedError
from .groups import Groups, Message

LOG = logging.getLogger("tallyd")

PAUSE_MIN_S = 0.1
# The longest pause between two attempts to connect. The pause is short, so that a new publish does not spend most of
# its deadline waiting.
PAUSE_MAX_S = 1.0
CLOSE_S = 1.0


class _Lost(Exception):
    """The session ended before the confirm. The message may have arrived."""


class _Nack(Exception):
    pass


class _Return(Exception):
    pass


class _Refused(Exception):
    """The broker closed the channel for a reason that a retry does not change."""


class _Closed(Exception):
    """The client was closed during the call."""


class _LoginRefused(Exception):
    """The broker refused the user or the password."""


class _Pending:
    __slots__ = ("done", "returned")

    def __init__(self, done: asyncio.Future[None]) -> None:
        self.done = done
        self.returned: Optional[str] = None


class _Session:
    """One connection. The session ends at the first failure, and is never used again."""

    def __init__(self, parameters: pika.connection.Parameters, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._silence_s = silence_s
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.ended: asyncio.Future[Exception] = self._loop.create_future()
        self.blocked: Optional[str] = None
        self._channel: Any = None
        self._pending: Dict[int, _Pending] = {}
        self._published = 0
        self._heard_at = 0.0
        self._watch: Optional[asyncio.TimerHandle] = None
        self._connection: Any = None
        self._workflow: Any = AsyncioConnection.create_connection([parameters], self._on_connected, custom_ioloop=self._loop)

    # ------------------------------------------------------------------ opening

    def _on_connected(self, result: Any) -> None:
        self._workflow = None
        if not isinstance(result, AsyncioConnection):
            return self._end(_as_error(result))
        self._connection = connection = result
        if self.ended.done():
            return self.abort(self.ended.result())
        connection.add_on_close_callback(lambda _, error: self._end(_as_error(error)))
        connection.add_on_connection_blocked_callback(self._on_blocked)
        connection.add_on_connection_unblocked_callback(lambda *_: self._on_unblocked())
        connection.channel(on_open_callback=self._on_channel)

    def _on_channel(self, channel: Any) -> None:
        self._channel = channel
        channel.add_on_close_callback(lambda _, error: self.abort(_as_error(error)))
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=lambda _: self._is_open())

    def _is_open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    # ------------------------------------------------------------------ publishing

    def publish(self, message: Message) -> asyncio.Future[None]:
        done: asyncio.Future[None] = self._loop.create_future()
        if self.ended.done():
            done.set_exception(_Lost(self.ended.result()))
            return done
        tag = self._published + 1
        # `message_id` identifies a message that the broker returns.
        headers = None if message.traceparent is None else {"traceparent": message.traceparent}
        properties = pika.BasicProperties(content_type="application/json", delivery_mode=2, message_id=str(tag), headers=headers)
        try:
            self._channel.basic_publish(message.exchange, message.routing_key, message.body, properties, mandatory=True)
        except Exception as error:
            self.abort(error)
            done.set_exception(_Lost(error))
            return done
        self._published = tag
        if not self._pending:
            self._heard_at = self._loop.time()
        self._pending[tag] = _Pending(done)
        if self._watch is None:
            self._watch = self._loop.call_later(self._silence_s, self._on_watch)
        return done

    def _on_return(self, _channel: Any, method: Any, properties: Any, _body: bytes) -> None:
        tag = properties.message_id
        pending = self._pending.get(int(tag)) if tag and tag.isdigit() else None
        if pending is not None:
            pending.returned = method.reply_text

    def _on_confirm(self, frame: Any) -> None:
        self._heard_at = self._loop.time()
        tag, is_nack = frame.method.delivery_tag, isinstance(frame.method, pika.spec.Basic.Nack)
        # A dict keeps the order in which tags were added.
        tags: List[int] = [tag]
        if frame.method.multiple:
            tags = [known for known in self._pending if tag == 0 or known <= tag]
        for known in tags:
            pending = self._pending.pop(known, None)
            if pending is None or pending.done.done():
                continue
            if is_nack:
                pending.done.set_exception(_Nack())
            elif pending.returned is not None:
                pending.done.set_exception(_Return(pending.returned))
            else:
                pending.done.set_result(None)

    # ------------------------------------------------------------------ watching, ending

    def _on_blocked(self, _connection: Any, frame: Any) -> None:
        self.blocked = frame.method.reason or "no reason given"
        LOG.warning("RabbitMQ blocks publishers: %s. Publishing waits until RabbitMQ has enough memory and disk space.", self.blocked)

    def _on_unblocked(self) -> None:
        self.blocked = None
        self._heard_at = self._loop.time()

    def _on_watch(self) -> None:
        """A slow broker confirms from time to time. A broker that confirms nothing has stalled, and the connection is dropped."""
        self._watch = None
        if not self._pending:
            return
        silent_s = self._loop.time() - self._heard_at
        if silent_s < self._silence_s or self.blocked is not None:
            wait_s = self._silence_s if self.blocked is not None else self._silence_s - silent_s
            self._watch = self._loop.call_later(max(wait_s, 0.01), self._on_watch)
        else:
            self.abort(TimeoutError(f"RabbitMQ confirmed nothing for {silent_s:.1f} s"))

    def _end(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_result(error)
        if not self.opened.done():
            self.opened.set_exception(_Lost(error))
            # Mark the exception as read: after a timeout the outer loop no longer waits for `opened`.
            self.opened.exception()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        is_final = isinstance(error, ChannelClosedByBroker) and error.reply_code in (403, 404)
        pending, self._pending = self._pending, {}
        for message in pending.values():
            if not message.done.done():
                message.done.set_exception(_Refused(error) if is_final else _Lost(error))

    def abort(self, error: Exception) -> None:
        """Ends the connection without waiting for the broker."""
        self._end(error)
        try:
            if self._workflow is not None:
                self._workflow.abort()
            elif self._connection is not None and self._connection.is_open:
                # pika's own close() waits for the broker.
                self._connection._terminate_stream(error)
        except Exception as failed:
            LOG.debug("close a connection that failed: %r", failed)

    async def close(self) -> None:
        """Closes the connection cleanly if the broker answers."""
        closed = ConnectionError("the client was closed")
        if self.ended.done() or self._connection is None or not self._connection.is_open:
            return self.abort(closed)
        self._connection.close()
        try:
            await asyncio.wait_for(asyncio.shield(self.ended), CLOSE_S)
        except asyncio.TimeoutError:
            self._end(closed)
            self._connection._terminate_stream(closed)


def _as_error(error: Any) -> Exception:
    return error if isinstance(error, Exception) else ConnectionError(str(error))


def _named(error: Optional[BaseException]) -> str:
    """Returns the cause of an error in a few words. pika wraps the cause several times, and some of its errors have no text."""
    while isinstance(error, _Lost) and error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    nested = getattr(error, "exceptions", None) or getattr(error, "exception", None) or (error and error.args and error.args[0])
    nested = nested[-1] if isinstance(nested, (list, tuple)) else nested
    if isinstance(nested, BaseException):
        return _named(nested)
    return str(error or "no answer") or type(error).__name__


class Publisher:
    """Publishes events. A publisher belongs to one event loop."""

    def __init__(self, url: str, *, deadline_s: float, heartbeat_s: int, in_flight_max: int, group_ms: float) -> None:
        self._parameters = pika.URLParameters(url)
        self._parameters.heartbeat = heartbeat_s
        self._parameters.connection_attempts = 1
        # The client detects a stalled broker after half of the deadline. The other half is for the next connection.
        self._silence_s = deadline_s / 2
        # The session has its own timeout.
        self._parameters.socket_timeout = self._parameters.stack_timeout = None
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._in_flight = asyncio.Semaphore(in_flight_max)
        self._groups = Groups(group_ms / 1_000, self._until_confirmed)
        self._session: asyncio.Future[_Session] = self._loop.create_future()
        self._last_error: Optional[BaseException] = None
        self._task = self._loop.create_task(self._keep_connected())

    async def _keep_connected(self) -> None:
        pause_s, logged = PAUSE_MIN_S, ""
        while True:
            try:
                error: BaseException = await self._one_session()
                pause_s, logged = PAUSE_MIN_S, ""
            except Exception as failed:
                error = failed
                # pika raises the same class if the connection is lost during the login, so check the text.
                if _named(failed).startswith("ConnectionClosedByBroker: (403)"):
                    self._refuse_login(_named(failed))
            self._last_error = error
            # Log each failure once, not each try.
            if logged != _named(error):
                logged = _named(error)
                LOG.warning("RabbitMQ: %s. The client connects again.", logged)
            await asyncio.sleep(random.uniform(pause_s / 2, pause_s))
            pause_s = min(pause_s * 2, PAUSE_MAX_S)

    def _refuse_login(self, why: str) -> None:
        """Raises an error in all calls that are waiting for a session. Later calls wait for the next try."""
        self._session.set_exception(_LoginRefused(why))
        # Mark the exception as read, because perhaps no call waits for it.
        self._session.exception()
        self._session = self._loop.create_future()

    async def _one_session(self) -> Exception:
        """Keeps a session until it ends, and returns the error that ended it. If the session does not open, raises the error."""
        session = _Session(self._parameters, self._silence_s)
        try:
            await asyncio.wait_for(asyncio.shield(session.opened), self._silence_s)
            LOG.info("connected to RabbitMQ")
            self._session.set_result(session)
            return await asyncio.shield(session.ended)
        except asyncio.TimeoutError:
            late = TimeoutError(f"RabbitMQ did not open the connection in {self._silence_s:.1f} s")
            session.abort(late)
            raise late from None
        except asyncio.CancelledError:
            await session.close()
            raise
        finally:
            if self._session.done():
                self._session = self._loop.create_future()

    async def publish(self, event: Event, message: Message, ends_at: float) -> None:
        """Publishes an event. Returns when the broker has the event on disk, in a queue.

        `ends_at` is the deadline on the event loop's clock (`loop.time()`).
        """
        try:
            await asyncio.wait_for(self._confirmed(message, ends_at), ends_at - self._loop.time())
        except asyncio.TimeoutError:
            why = self._blocked() or _named(self._last_error)
            raise UnconfirmedError(
                f"RabbitMQ did not confirm the event in {self._deadline_s:g} s ({why}). It may have arrived: publish `event` again, "
                "which is safe",
                event,
            ) from self._last_error
        except _Closed:
            raise UnconfirmedError(
                "the client was closed before RabbitMQ confirmed the event. It may have arrived: publish `event` again, which is safe", event
            ) from None
        except _LoginRefused as refused:
            raise LoginError(
                f"RabbitMQ refused the login ({refused}): check user and password in `amqp_url`, then publish `event` again", event
            ) from None
        except _Nack:
            raise NackedError(
                "RabbitMQ rejected the event (nack): a queue is full or failed. Check the queues, then publish `event` again", event
            ) from None
        except _Return as returned:
            raise ReturnedError(
                f"no queue takes the event ({returned}): exchange {message.exchange} has no binding for it. Start the daemon once: it "
                "declares the queues. Then publish `event` again",
                event,
            ) from None
        except _Refused as refused:
            closed = refused.args[0]
            if closed.reply_code == 404:
                raise ReturnedError(
                    f"{closed.reply_text}. Start the daemon once, which declares the exchange; then publish `event` again", event
                ) from refused
            raise RejectedError(
                f"{closed.reply_text}. Allow the account to write to {message.exchange}, then publish `event` again", event
            ) from refused

    async def _confirmed(self, message: Message, ends_at: float) -> None:
        async with self._in_flight:
            await self._groups.add(message, ends_at)

    async def _until_confirmed(self, message: Message) -> None:
        was_sent = False
        while True:
            try:
                session = await asyncio.shield(self._session)
            except _LoginRefused:
                # If an earlier session has sent the event, the event may have arrived. Then wait for the next session.
                if was_sent:
                    continue
                raise
            was_sent = True
            try:
                return await session.publish(message)
            except _Lost as lost:
                self._last_error = lost
                # Let the outer loop remove the session first.
                await asyncio.sleep(0)

    def _blocked(self) -> Optional[str]:
        if not self._session.done() or self._session.exception() is not None:
            return None
        blocked = self._session.result().blocked
        return blocked and f"RabbitMQ blocks publishers: {blocked}"

    async def close(self) -> None:
        self._groups.flush()
        # Lets the list go.
        await asyncio.sleep(0)
        self._task.cancel()
        try:
            await self._task
        except asyncio.CancelledError:
            pass
        # Calls that still wait for a confirm must not wait for their deadline.
        if not self._session.done():
            self._session.set_exception(_Closed())
            # Mark the exception as read, because perhaps no call waits for it.
            self._session.exception()
