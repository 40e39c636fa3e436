"""The places of numbers in Redis, as docs/layouts.md and docs/scripts.md have them."""

from __future__ import annotations

import re
import zlib
from typing import Optional, Tuple, Union

from .card import Card

Command = Tuple[Union[str, int], ...]

# The first letter of a bucket's number.
_LETTERS = {"packed": "", "entity": "h", "string": "s"}
_NUMBER = re.compile("-?[0-9]+")

# Reads the bucket's field `_` and the number at one instant. With two commands, a flush of Redis between them would look like zero.
READ_SCRIPT = """
local number
if ARGV[1] == '' then
    number = redis.pcall('GET', KEYS[2])
else
    number = redis.pcall('HGET', KEYS[2], ARGV[1])
end
return { redis.call('HGET', KEYS[1], '_'), type(number) == 'table' and '?' or number }
"""


def bucket_of(card: Card, kind: str, target_id: str) -> str:
    """Returns the bucket's name, for instance video:3a2f."""
    bucket = 1 << card.bucket_bits | zlib.crc32(target_id.encode()) & ((1 << card.bucket_bits) - 1)
    return f"{kind}:{_LETTERS[card.form]}{bucket:x}"


def read_of(card: Card, key_prefix: str, kind: str, metric: str, target_id: str) -> Command:
    """Returns the command that reads a target's number. Its answer is the bucket's field `_`, and the number's field or key."""
    bucket = f"{key_prefix}c:{{{bucket_of(card, kind, target_id)}}}"
    if card.form == "packed":
        return ("HMGET", bucket, "_", target_id)
    key = key_prefix + card.counter_key.replace("{kind}", kind).replace("{id}", target_id).replace("{metric}", metric)
    return ("EVAL", READ_SCRIPT, 2, bucket, key, metric if card.form == "entity" else "")


def number_in(card: Card, kind: str, metric: str, loaded: Optional[str], value: Optional[str]) -> Optional[int]:
    """Returns the number from the answer to `read_of`. `None` means that the number is unknown, not zero."""
    if loaded is None or loaded.startswith("~") or card.metrics is None:
        return None
    text = value or "0"
    if card.form == "packed":
        numbers, place = text.split(","), card.metrics[metric]
        text = numbers[place - 1] if len(numbers) >= place else "0"
    if not _NUMBER.fullmatch(text):
        return None
    # Late events can push a number below zero for a moment.
    return int(text) if f"{kind}:{metric}" in card.below_zero else max(int(text), 0)
