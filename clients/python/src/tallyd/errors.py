"""The errors of this package. Each message says what to do."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional, Sequence, Union

Event = Dict[str, Any]


class TallydError(Exception):
    """Base class of all errors of this package. Its first argument is the message."""

    def __str__(self) -> str:
        return str(self.args[0])


class RefusedError(TallydError, ValueError):
    """The call does not fit the site. Nothing was sent. `reason` is the daemon's code for the problem, as in docs/events.md, or
    `counted-by-api`: API servers must count this number with a script (docs/scripts.md)."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(reason, problem)
        self.reason = reason
        self.problem = problem

    def __str__(self) -> str:
        return f"{self.reason}: {self.problem}"


class PublishError(TallydError):
    """The broker did not confirm `event`. Call `site.publish(error.event)` to publish the same event again."""

    def __init__(self, message: str, event: Event) -> None:
        super().__init__(message, event)
        self.event = event


class UnconfirmedError(PublishError):
    """No confirm arrived before the deadline. The broker may have the event nevertheless."""


class RejectedError(PublishError):
    """The broker rejected the event. Fix the cause first, then publish the event again."""


class NackedError(RejectedError):
    """A queue rejected the event, for instance because it is full."""


class ReturnedError(RejectedError):
    """No queue takes the event: the exchange or the queues do not exist."""


class LoginError(RejectedError):
    """RabbitMQ refused the user or the password. The event was not sent."""


class LimitedError(RejectedError):
    """The user clicks more often than the gateway allows. The event can be published after `wait_s`."""

    def __init__(self, message: str, event: Event, wait_s: float) -> None:
        super().__init__(message, event)
        self.args = (message, event, wait_s)
        self.wait_s = wait_s


class PublishManyError(TallydError):
    """Some events of a list were not confirmed. `results` has each event or its error, in order.

    To publish the unconfirmed events again, call `site.publish_many(error.events)`. `events` does not include refused events.
    """

    def __init__(self, results: Sequence[Union[Event, TallydError]]) -> None:
        super().__init__(results)
        self.results = list(results)

    def __str__(self) -> str:
        errors = [result for result in self.results if isinstance(result, TallydError)]
        classes = ", ".join(f"{name} {count}" for name, count in Counter(type(error).__name__ for error in errors).items())
        return f"{len(errors)} of {len(self.results)} events were not confirmed ({classes}). The first error: {errors[0]}"

    @property
    def events(self) -> List[Event]:
        return [result.event for result in self.results if isinstance(result, PublishError)]


class ReadError(TallydError):
    """Redis or the gateway did not answer. The number is unknown, not zero."""


class GatewayError(ReadError):
    """The gateway rejected the request. `code` is the gateway's code for the problem."""

    def __init__(self, message: str, status: int, code: Optional[str]) -> None:
        super().__init__(message, status, code)
        self.status = status
        self.code = code
