"""Counters in Redis: the layout `packed` of docs/scripts.md."""

from __future__ import annotations

import zlib
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from redis.exceptions import AuthenticationError

from .errors import ReadError

Answer = Sequence[Union[bytes, str, None]]


class Layout(NamedTuple):
    key_prefix: str
    bucket_bits: int
    metrics: Mapping[str, int]

    def bucket_of(self, kind: str, target_id: str) -> str:
        """Returns the bucket's name, for instance video:3a2f."""
        bucket = 1 << self.bucket_bits | zlib.crc32(target_id.encode()) & ((1 << self.bucket_bits) - 1)
        return f"{kind}:{bucket:x}"

    def key_of(self, bucket: str) -> str:
        return f"{self.key_prefix}c:{{{bucket}}}"

    @property
    def missing(self) -> str:
        """Returns the key of the set of buckets that the daemon must load."""
        return f"{self.key_prefix}c:missing"

    def fetches(self, kind: str, target_ids: Sequence[str]) -> List[Tuple[str, str]]:
        """Returns the key and the field of each target. HMGET must read `_` and the field."""
        return [(self.key_of(self.bucket_of(kind, target_id)), target_id) for target_id in target_ids]

    def numbers(
        self, kind: str, metric: str, target_ids: Sequence[str], answers: Sequence[Answer]
    ) -> Tuple[Dict[str, Optional[int]], List[str]]:
        """Returns the numbers, and the names of the buckets that Redis has lost."""
        found: Dict[str, Optional[int]] = {}
        missing: Dict[str, None] = {}
        for target_id, (loaded, value) in zip(target_ids, answers):
            loaded, value = _text(loaded), _text(value)
            found[target_id] = number_in(loaded, value, self.metrics[metric])
            if loaded is None:
                missing[self.bucket_of(kind, target_id)] = None
        return found, list(missing)


def _text(value: Union[bytes, str, None]) -> Optional[str]:
    return value.decode() if isinstance(value, bytes) else value


def read_error(error: BaseException) -> ReadError:
    # Older versions of redis-py have no class for WRONGPASS.
    if isinstance(error, AuthenticationError) or str(error).startswith("WRONGPASS"):
        return ReadError(f"Redis refused the login ({error}): treat the numbers as unknown, and check user and password in `redis_url`")
    return ReadError(f"Redis did not answer ({error}): treat the numbers as unknown, and check that Redis runs")


def number_in(loaded: Optional[str], value: Optional[str], place: int) -> Optional[int]:
    """Returns the number at `place` in a bucket's field `value`. `loaded` is the bucket's field `_`. `None` means that the number is unknown, not zero."""
    if loaded is None or loaded.startswith("~"):
        return None
    numbers = value.split(",") if value else []
    try:
        return int(numbers[place - 1]) if len(numbers) >= place else 0
    except ValueError:
        return None
