"""The client for asyncio."""

from __future__ import annotations

import asyncio
import re
import uuid
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, TypeVar, Union
from urllib.parse import quote

from .card import REASONS, Card
from .errors import Event, PublishManyError, RefusedError, TallydError
from .events import Id, a_name, an_id, checked, checked_list
from .gateway import Gateway
from .publisher import Publisher
from .reader import Reader
from .sender import Result, ToGateway, ToRabbitmq
from .settings import Base

TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

T = TypeVar("T")


class AsyncTallyd(Base):
    __doc__ = f"Publishes and reads with asyncio. A client belongs to the event loop that uses it first.\n\n{Base.__doc__}"

    _reader: Optional[Reader] = None
    _sender: Union[ToRabbitmq, ToGateway, None] = None

    async def __aenter__(self) -> AsyncTallyd:
        if self._amqp_url is not None:
            self._connected()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Sends the events that wait for each other, and closes the connections. A call that waits for a confirm raises UnconfirmedError;
        through the gateway it first waits for the gateway's answer."""
        self._is_closed = True
        if self._sender is not None:
            await self._sender.close()
        if self._reader is not None:
            await self._reader.close()
        if self._gateway is not None:
            self._gateway.close()

    # ------------------------------------------------------------------ publishing

    async def like(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        """Publishes a like. Returns the event when the broker has it on disk, in a queue. `at` is the time of the click in
        microseconds since 1970, by default now. Raises RefusedError, and PublishError if no confirm arrived."""
        return await self._new({"type": "like", "kind": kind, "target_id": target_id, "user_id": user_id, "at": at})

    async def unlike(self, kind: str, target_id: Id, user_id: Id, *, at: Optional[int] = None) -> Event:
        """Publishes that the user no longer likes the target. Otherwise like `like`."""
        return await self._new({"type": "unlike", "kind": kind, "target_id": target_id, "user_id": user_id, "at": at})

    async def count(
        self, kind: str, target_id: Id, metric: str, delta: int = 1, *, event_id: Optional[str] = None, at: Optional[int] = None
    ) -> Event:
        """Publishes that a number changed by `delta`. Otherwise like `like`."""
        event = {"type": "count", "kind": kind, "target_id": target_id, "metric": metric, "delta": delta, "event_id": event_id, "at": at}
        return await self._new(event)

    async def set(self, kind: str, target_id: Id, metric: str, value: int, *, at: Optional[int] = None) -> Event:
        """Publishes a new value of a settable number. Otherwise like `like`."""
        return await self._new({"type": "set", "kind": kind, "target_id": target_id, "metric": metric, "value": value, "at": at})

    async def reset(self, kind: str, target_id: Id, metric: str, *, at: Optional[int] = None) -> Event:
        """Publishes that a settable number is zero. Otherwise like `like`."""
        return await self._new({"type": "reset", "kind": kind, "target_id": target_id, "metric": metric, "at": at})

    async def publish(self, event: Mapping[str, Any]) -> Event:
        """Publishes an event again, for instance the event of an error, or an event that a script has counted. The event keeps its
        `at`, because with a new `at` it would be another event."""
        (result,) = await self._publish(lambda card: [checked(event, card)])
        return _event(result)

    async def publish_many(self, events: Iterable[Mapping[str, Any]]) -> List[Event]:
        """Publishes events together. An event without `at` gets the current time. A count without `event_id`
        gets a new id. Raises PublishManyError if an event was not confirmed."""
        given = [self._completed(event) for event in events]
        results = await self._publish(lambda card: checked_list(given, card))
        confirmed = [result for result in results if not isinstance(result, TallydError)]
        if len(confirmed) < len(results):
            raise PublishManyError(results)
        return confirmed

    async def _new(self, event: Mapping[str, Any]) -> Event:
        given, _ = self._completed(event)
        (result,) = await self._publish(lambda card: [checked(given, card, is_new=True)])
        return _event(result)

    def _completed(self, event: Mapping[str, Any]) -> Tuple[Mapping[str, Any], bool]:
        is_new = event.get("at") is None
        if is_new:
            event = {**event, "at": self._clock.at()}
        if event.get("type") == "count" and event.get("event_id") is None:
            event = {**event, "event_id": str(uuid.uuid4())}
        return event, is_new

    async def _publish(self, check: Callable[[Card], List[Event]]) -> List[Result]:
        ends_at = asyncio.get_running_loop().time() + self._connection["deadline_s"]
        sender = self._connected()
        card, events = await self._with_card(lambda card: (card, check(card)))
        traceparent = self._settings["traceparent"]()
        is_valid = isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent)
        return await sender.publish(events, card, ends_at, traceparent if is_valid else None)

    def _connected(self) -> Union[ToRabbitmq, ToGateway]:
        self._must_be_open()
        if self._sender is None:
            if self._amqp_url is not None:
                self._sender = ToRabbitmq(Publisher(self._amqp_url, **self._connection))
            elif self._gateway is not None:
                self._sender = ToGateway(self._gateway)
            else:
                raise ValueError("no server to publish to: pass amqp_url or gateway")
        return self._sender

    async def _with_card(self, use: Callable[[Card], T]) -> T:
        """Calls `use` with the site's card. If the card refuses the call, reads the card again and tries once more."""
        if self._redis_url is None:
            return use(Card())
        reader = self._reads()
        try:
            return use(await reader.card())
        except RefusedError as error:
            if error.reason not in REASONS:
                raise
        return use(await reader.fresh_card())

    # ------------------------------------------------------------------ reading

    async def counts(self, kind: str, target_ids: Iterable[Id], metric: str = "like") -> Dict[Id, Optional[int]]:
        """Reads the number of each target. `None` means that the number is unknown, not zero. Raises ReadError if no server
        answered."""
        given = list(target_ids)
        ids = [an_id(target_id) for target_id in given]

        def named(card: Card) -> Card:
            a_name(kind, "kind", card.kinds)
            a_name(metric, "metric", card.metrics)
            return card

        card = await self._with_card(named)
        if not ids:
            return {}
        if self._gateway is not None:
            return _as_given(given, ids, await asyncio.to_thread(self._gateway.counters, kind, ids, metric))
        # Shield the command from cancellation. Otherwise the next command on this connection would get the cancelled
        # command's answer.
        return _as_given(given, ids, await asyncio.shield(self._reads().counters(card, kind, ids, metric)))

    def _reads(self) -> Reader:
        self._must_be_open()
        if self._redis_url is None:
            raise ValueError("no server to read from: pass redis_url or gateway")
        if self._reader is None:
            self._reader = Reader(self._redis_url, self._settings["key_prefix"], self._connection["deadline_s"])
        return self._reader

    async def liked(self, kind: str, target_ids: Iterable[Id], user_id: Id) -> Dict[Id, bool]:
        """Reads whether the user likes each target. Needs the gateway."""
        given = list(target_ids)
        ids, user = [an_id(target_id) for target_id in given], an_id(user_id, "user_id")
        return _as_given(given, ids, await asyncio.to_thread(self._needs_gateway().likes, kind, ids, user))

    async def board(
        self, name: str, period: Optional[str] = None, *, top: int = 100, around: Optional[Id] = None, radius: Optional[int] = None
    ) -> Dict[str, Any]:
        """Reads a board's members with rank and score. Needs the gateway."""
        asked = {"period": period, "top": top, "around": around, "radius": radius}
        query = {name: value for name, value in asked.items() if value is not None}
        answer: Dict[str, Any] = await asyncio.to_thread(self._needs_gateway().get, f"/v1/boards/{quote(name, safe='')}", query)
        return answer

    def _needs_gateway(self) -> Gateway:
        if self._gateway is None:
            raise ValueError("only the gateway can read this: pass gateway=URL")
        return self._gateway


def _event(result: Result) -> Event:
    if isinstance(result, TallydError):
        raise result
    return result


def _as_given(given: Sequence[Id], ids: Sequence[str], found: Mapping[str, Any]) -> Dict[Id, Any]:
    """Returns the found values, with the ids as the caller passed them."""
    return {key: found.get(target_id) for key, target_id in zip(given, ids)}
