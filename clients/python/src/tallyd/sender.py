"""Publishes events: to RabbitMQ, or over HTTP through the gateway if the client has no `amqp_url`."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, List, Mapping, Optional, Sequence, Union

from .card import Card
from .errors import Event, GatewayError, LimitedError, PublishError, RefusedError, RejectedError, TallydError, UnconfirmedError
from .events import body_of, routing_key_of
from .gateway import EVENTS_MAX, THREADS_MAX, Gateway, NoAnswer, NotSent
from .groups import Message
from .publisher import Publisher

PAUSE_S = 0.1

# The event in the published form, or the error if it was not published.
Result = Union[Event, TallydError]


class ToRabbitmq:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    async def publish(self, events: Sequence[Event], card: Card, ends_at: float, traceparent: Optional[str]) -> List[Result]:
        """Returns the result of each event, in order. `ends_at` is the deadline on the event loop's clock."""

        async def result_of(event: Event) -> Result:
            by = card.partition_by
            message = Message(card.exchange, routing_key_of(event, by), body_of(event), traceparent, is_alone=by != "user")
            try:
                await self._publisher.publish(event, message, ends_at)
                return event
            except PublishError as error:
                return error

        return await asyncio.gather(*map(result_of, events))

    async def close(self) -> None:
        await self._publisher.close()


class ToGateway:
    """Publishes with POST /v1/events. Sends an event again only if the gateway said that it has not confirmed it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._threads = ThreadPoolExecutor(THREADS_MAX, "tallyd-gateway")
        self._is_closed = False

    async def publish(self, events: Sequence[Event], _card: Card, ends_at: float, traceparent: Optional[str]) -> List[Result]:
        """Returns the result of each event, in order. `ends_at` is the deadline on the event loop's clock."""
        results: List[Result] = []
        for first in range(0, len(events), EVENTS_MAX):
            results += await self._posted(events[first : first + EVENTS_MAX], ends_at, traceparent)
        return results

    async def _posted(self, events: Sequence[Event], ends_at: float, traceparent: Optional[str]) -> List[Result]:
        loop = asyncio.get_running_loop()
        results: List[Optional[Result]] = [None] * len(events)
        left, why = list(range(len(events))), "no answer"
        while left and loop.time() < ends_at and not self._is_closed:
            post, some = self._gateway.publish, [events[place] for place in left]
            try:
                verdicts = await loop.run_in_executor(self._threads, post, some, ends_at, traceparent)
            except NotSent as error:
                why = str(error)
            except NoAnswer as error:
                why = str(error)
                break
            except GatewayError as error:
                return [result or _rejected(event, error) for event, result in zip(events, results)]
            else:
                for place, verdict in zip(left, verdicts):
                    results[place] = _judged(events[place], verdict)
                left = [place for place in left if results[place] is None]
                why = next((verdict["message"] for verdict in verdicts if verdict["verdict"] == "unconfirmed"), why)
            if left:
                await asyncio.sleep(PAUSE_S)
        return [result or _unconfirmed(event, why) for event, result in zip(events, results)]

    async def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False)


def _judged(event: Event, verdict: Mapping[str, Any]) -> Optional[Result]:
    """Returns the result, or `None` if the gateway has not confirmed the event."""
    name = verdict["verdict"]
    if name == "confirmed":
        return event
    if name == "refused":
        return RefusedError(verdict["reason"], verdict["message"])
    if name == "limited":
        wait_s = verdict["wait_ms"] / 1_000
        return LimitedError(f"the user clicks too often: publish `event` again in {wait_s:g} s", event, wait_s)
    return None


def _rejected(event: Event, error: GatewayError) -> RejectedError:
    return RejectedError(f"{error}. Fix the cause, then publish `event` again", event)


def _unconfirmed(event: Event, why: str) -> UnconfirmedError:
    return UnconfirmedError(
        f"the gateway did not confirm the event ({why}). It may have arrived: publish `event` again, which is safe", event
    )
