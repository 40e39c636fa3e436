"""Errors. Each says what to do."""

from __future__ import annotations

from typing import Any, Dict, Optional

Event = Dict[str, Any]


class TallydError(Exception):
    """Base class of all errors of this package."""


class RefusedError(TallydError, ValueError):
    """An argument is not valid. Nothing was sent. `reason` is the daemon's name for it, as in docs/events.md."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason


class PublishError(TallydError):
    """The broker did not confirm `event`. Call `site.publish(error.event)` to publish the same event again."""

    def __init__(self, message: str, event: Event) -> None:
        super().__init__(message)
        self.event = event

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.event)


class UnconfirmedError(PublishError):
    """No confirm arrived before the deadline. The broker can have the event all the same."""


class RejectedError(PublishError):
    """The broker rejected the event. Fix the cause first, then publish the event again."""


class NackedError(RejectedError):
    """A queue rejected the event, for instance because it is full."""


class ReturnedError(RejectedError):
    """No queue takes the event: exchange or queues do not exist."""


class ReadError(TallydError):
    """Redis or the gateway did not answer. The number is unknown, not zero."""


class GatewayError(ReadError):
    """The gateway rejected the request. `code` is the gateway's name for the problem."""

    def __init__(self, message: str, status: int, code: Optional[str]) -> None:
        super().__init__(message)
        self.status = status
        self.code = code

    def __reduce__(self) -> Any:
        return type(self), (str(self), self.status, self.code)
