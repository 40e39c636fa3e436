"""Reads and publishes through `tallyd gateway`, with only the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import selectors
import socket
import ssl
import time
from collections import deque
from typing import Any, Deque, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple
from urllib.parse import unquote, urlencode, urlsplit

from .errors import Event, GatewayError, ReadError
from .events import body_of

# The largest number of targets or of events in a request.
IDS_MAX = 500
EVENTS_MAX = 1_000
THREADS_MAX = 32


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class NoAnswer(Exception):
    """The gateway did not answer. The gateway may have published the events nevertheless."""


class NotSent(Exception):
    """The gateway is unreachable or busy. It has not processed the events."""


class Gateway:
    """Keeps connections to the gateway open. Threads can share it."""

    def __init__(self, url: str, token: Optional[str], timeout_s: float) -> None:
        self._url = urlsplit(url)
        if self._url.scheme not in ("http", "https", "unix"):
            raise ValueError(f"gateway is {url!r}, allowed are http://, https:// and unix:///path")
        self._headers = {"Accept": "application/json"}
        if token is not None:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_s = timeout_s
        self._idle: Deque[http.client.HTTPConnection] = deque()

    def counters(self, kind: str, target_ids: Sequence[str], metric: str) -> Dict[str, Optional[int]]:
        found: Dict[str, Optional[int]] = {}
        for ids in _chunks(target_ids):
            answer = self.get("/v1/counters", {"kind": kind, "ids": ",".join(ids), "metrics": metric})
            found.update((counter["id"], counter[metric]) for counter in answer["counters"])
        return found

    def likes(self, kind: str, target_ids: Sequence[str], user_id: str) -> Dict[str, bool]:
        found: Dict[str, bool] = {}
        for ids in _chunks(target_ids):
            answer = self.get("/v1/likes", {"user": user_id, "kind": kind, "ids": ",".join(ids)})
            found.update((like["id"], like["liked"]) for like in answer["likes"])
        return found

    def get(self, path: str, query: Mapping[str, Any]) -> Any:
        target = f"{path}?{urlencode(query)}"
        try:
            try:
                status, answer = self._call(target, None, self._timeout_s)
            except ConnectionError:
                # The gateway closed an idle connection at this moment.
                self.close()
                status, answer = self._call(target, None, self._timeout_s)
        except (NotSent, http.client.HTTPException, OSError) as error:
            raise ReadError(f"the gateway did not answer ({error}): treat the number as unknown, and check that the gateway runs") from error
        if status == 200 and answer:
            return answer
        raise _error(status, answer)

    def publish(self, events: Sequence[Event], until: float, traceparent: Optional[str] = None) -> List[Dict[str, Any]]:
        """Publishes events, and returns the verdict on each. `until` is a time of time.monotonic(). Raises NotSent, NoAnswer, or
        GatewayError if the request is wrong. After NoAnswer the gateway may have published the events: do not send them again."""
        body = b"[" + b",".join(map(body_of, events)) + b"]"
        try:
            status, answer = self._call("/v1/events", body, max(until - time.monotonic(), 0.01), traceparent)
        except (http.client.HTTPException, OSError) as failed:
            raise NoAnswer(f"no answer ({failed})") from failed
        verdicts = answer.get("events") if isinstance(answer, dict) else None
        if isinstance(verdicts, list) and len(verdicts) == len(events):
            return verdicts
        error = _error(status, answer)
        if status in (408, 503):
            raise NotSent(str(error))
        raise NoAnswer(str(error)) if status >= 500 else error

    def _call(self, target: str, body: Optional[bytes], timeout_s: float, traceparent: Optional[str] = None) -> Tuple[int, Any]:
        """Sends GET, or POST if there is a body. Returns the status and the parsed JSON, or `None` if the answer is not JSON."""
        connection = self._connected(timeout_s)
        try:
            status, text = self._ask(connection, target, body, traceparent)
        except (http.client.HTTPException, OSError):
            connection.close()
            raise
        self._idle.append(connection)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, None

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = self._idle_connection() or self._connection()
        connection.timeout = timeout_s
        if connection.sock is None:
            try:
                connection.connect()
            except OSError as error:
                connection.close()
                raise NotSent(f"no connection ({error})") from error
        connection.sock.settimeout(timeout_s)
        return connection

    def _idle_connection(self) -> Optional[http.client.HTTPConnection]:
        # Another thread can take the last one.
        with contextlib.suppress(IndexError):
            while True:
                connection = self._idle.pop()
                if connection.sock is not None and not _is_readable(connection.sock):
                    return connection
                # The gateway has closed it.
                connection.close()
        return None

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._url.hostname or "localhost", self._url.port
        if self._url.scheme == "unix":
            return _UnixConnection(unquote(self._url.path), self._timeout_s)
        if self._url.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=ssl.create_default_context())
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _ask(
        self, connection: http.client.HTTPConnection, target: str, body: Optional[bytes], traceparent: Optional[str]
    ) -> Tuple[int, bytes]:
        path = "" if self._url.scheme == "unix" else self._url.path.rstrip("/")
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        if traceparent is not None:
            headers = {**headers, "traceparent": traceparent}
        connection.request("GET" if body is None else "POST", path + target, body, headers)
        response = connection.getresponse()
        return response.status, response.read()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def _is_readable(sock: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))


def _chunks(ids: Sequence[str]) -> Iterator[List[str]]:
    return (list(ids[first : first + IDS_MAX]) for first in range(0, len(ids), IDS_MAX))


def _error(status: int, answer: Any) -> GatewayError:
    error = answer.get("error", {}) if isinstance(answer, dict) else {}
    code, message = error.get("code"), error.get("message", "no explanation")
    return GatewayError(f"the gateway answered {status} ({code}): {message}", status, code)
