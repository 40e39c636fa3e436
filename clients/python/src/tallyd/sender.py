"""Sends events to RabbitMQ. If API servers must count the number, it sends the event to the gateway, which counts it.

The gateway gets half of the deadline. If it does not answer, RabbitMQ gets the same event in the other half. So the event is
not lost, and the next reconcile corrects the number in Redis.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List, Mapping, Optional, Sequence, Set, Union

from .errors import Event, GatewayError, LimitedError, PublishError, RefusedError, RejectedError, TallydError, UnconfirmedError
from .events import body_of, number_of, routing_key_of
from .gateway import EVENTS_MAX, IDLE_MAX, Busy, Gateway, NoAnswer
from .publisher import Publisher
from .writers import Writers

LOG = logging.getLogger("tallyd")

PAUSE_S = 0.1

# The event in the published form, or the error if it was not published.
Result = Union[Event, TallydError]


class _Sent:
    """An event, and its result once it is known."""

    __slots__ = ("event", "traceparent", "result", "why")

    def __init__(self, event: Event, traceparent: Optional[str]) -> None:
        self.event = event
        self.traceparent = traceparent
        self.result: Optional[Result] = None
        self.why = "no answer"


class Sender:
    """Sends events. A sender belongs to one event loop."""

    def __init__(
        self, publisher: Optional[Publisher], gateway: Optional[Gateway], writers: Optional[Writers], partition_by: str, deadline_s: float
    ) -> None:
        self._publisher = publisher
        self._gateway = gateway
        self._writers = writers
        self._partition_by = partition_by
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(IDLE_MAX, "tallyd-gateway")
        self._warned: Set[str] = set()
        self._is_gateway_failing = False

    async def publish(self, events: Sequence[Event], traceparent: Optional[str] = None) -> List[Result]:
        """Waits for the broker to store all events on disk in its queues. If the deadline passes first, stops waiting and returns."""
        ends_at = self._loop.time() + self._deadline_s
        by_api = await self._writers.by_api() if self._writers is not None else ()
        sent = [_Sent(event, traceparent) for event in events]
        plain: List[_Sent] = []
        counted: List[_Sent] = []
        for one in sent:
            is_counted = number_of(one.event) in by_api
            if self._publisher is None or (is_counted and self._gateway is not None):
                counted.append(one)
            else:
                plain.append(one)
                if is_counted:
                    self._warn(number_of(one.event))
        await asyncio.gather(self._to_rabbitmq(plain, ends_at), self._to_gateway(counted, ends_at))
        return [one.result for one in sent if one.result is not None]

    def _warn(self, number: str) -> None:
        if number not in self._warned:
            self._warned.add(number)
            LOG.warning(
                "API servers count %s in Redis, and this client has no gateway to count it. The client publishes the events, but the number in "
                "Redis changes only with the next reconcile. Pass gateway=URL of `tallyd gateway`.",
                number,
            )

    # ------------------------------------------------------------------ RabbitMQ

    async def _to_rabbitmq(self, sent: Sequence[_Sent], ends_at: float) -> None:
        await asyncio.gather(*(self._confirmed(one, ends_at) for one in sent))

    async def _confirmed(self, one: _Sent, ends_at: float) -> None:
        assert self._publisher is not None
        event = one.event
        try:
            routing_key = routing_key_of(event, self._partition_by)
            await self._publisher.publish(event, routing_key, body_of(event), ends_at, one.traceparent)
            one.result = event
        except PublishError as error:
            one.result = error

    # ------------------------------------------------------------------ the gateway

    async def _to_gateway(self, sent: Sequence[_Sent], ends_at: float) -> None:
        until = ends_at if self._publisher is None else ends_at - self._deadline_s / 2
        for first in range(0, len(sent), EVENTS_MAX):
            await self._judged(sent[first : first + EVENTS_MAX], until)
        left = [one for one in sent if one.result is None]
        if self._publisher is not None and left:
            if not self._is_gateway_failing:
                LOG.warning("the gateway failed: %s. Events go directly to RabbitMQ, and the next reconcile corrects the numbers in Redis.", left[0].why)
            await self._to_rabbitmq(left, ends_at)
        for one in sent:
            if one.result is None:
                one.result = self._unconfirmed(one)
        if sent:
            self._is_gateway_failing = bool(left)

    async def _judged(self, sent: Sequence[_Sent], until: float) -> None:
        """Sets the results of all events that the gateway has accepted or rejected."""
        assert self._gateway is not None
        while sent and self._loop.time() < until:
            publish, events = self._gateway.publish, [one.event for one in sent]
            try:
                verdicts = await self._loop.run_in_executor(self._threads, publish, events, until, sent[0].traceparent)
            except NoAnswer as error:
                for one in sent:
                    one.why = str(error)
                if self._publisher is not None and not isinstance(error, Busy):
                    # Don't send a count again: Redis may have counted the event already, and would then count it twice.
                    # MySQL counts its `event_id` once.
                    sent = [one for one in sent if one.event["type"] != "count"]
            except GatewayError as error:
                for one in sent:
                    one.result = RejectedError(f"{error}. Fix the cause, then publish `event` again", one.event)
            else:
                for one, verdict in zip(sent, verdicts):
                    _judge(one, verdict)
            sent = [one for one in sent if one.result is None]
            if sent:
                await asyncio.sleep(PAUSE_S)

    def _unconfirmed(self, one: _Sent) -> UnconfirmedError:
        message = (
            f"the gateway did not confirm the event in {self._deadline_s:g} s ({one.why}). It may have arrived: publish `event` again, "
            "which is safe"
        )
        return UnconfirmedError(message, one.event)

    async def close(self) -> None:
        if self._writers is not None:
            self._writers.close()
        if self._publisher is not None:
            await self._publisher.close()
        self._threads.shutdown(wait=False)


def _judge(one: _Sent, verdict: Mapping[str, Any]) -> None:
    name = verdict.get("verdict")
    if name == "confirmed":
        one.result = {**one.event, "at": verdict["at"]}
    elif name == "refused":
        one.result = RefusedError(verdict["reason"], verdict["message"])
    elif name == "limited":
        wait_s = verdict["wait_ms"] / 1_000
        message = f"the user clicks too often: publish `event` again in {wait_s:g} s"
        one.result = LimitedError(message, one.event, wait_s)
    else:
        one.why = str(verdict.get("message", "no explanation"))
