"""Publishes likes and counts to tallyd, and reads the numbers."""

from .aio import AsyncTallyd
from .errors import (
    Event,
    GatewayError,
    LimitedError,
    LoginError,
    NackedError,
    PublishError,
    PublishManyError,
    ReadError,
    RefusedError,
    RejectedError,
    ReturnedError,
    TallydError,
    UnconfirmedError,
)
from .site import Tallyd

__all__ = [
    "AsyncTallyd",
    "Event",
    "GatewayError",
    "LimitedError",
    "LoginError",
    "NackedError",
    "PublishError",
    "PublishManyError",
    "ReadError",
    "RefusedError",
    "RejectedError",
    "ReturnedError",
    "Tallyd",
    "TallydError",
    "UnconfirmedError",
]
__version__ = "0.1.0"
