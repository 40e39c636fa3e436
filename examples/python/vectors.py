#!/usr/bin/env python3
"""Checks like.py, board.py and sets.py with the test cases in tests/vectors, which tallyd must also pass. This check
needs no server. To check your own client, replace the imports."""

import datetime
import json
import sys
from pathlib import Path

import board
import like
import sets

VECTORS = Path(__file__).resolve().parents[2] / "tests" / "vectors"


def check_buckets(bucket_bits, kind, id, key, recent, missing):
    like.BUCKET_BITS = bucket_bits
    assert list(like.keys(kind, id)) == [key, *recent]
    assert like.missing_name(key) == missing


def check_values(loaded, value, place, number, note_missing):
    encoded = [text and text.encode() for text in (loaded, value)]
    found = like.number_in(*encoded, place)
    assert (None if found is None else str(found)) == number
    assert like.is_missing(encoded[0]) == note_missing


def made_or_refused(make, body, refused):
    try:
        made = make()
    except like.Refused as error:
        assert error.reason == refused
        return
    assert made == body and [type(made[name]) for name in made] == [type(body[name]) for name in made]


def check_events(event, body=None, refused=None):
    names = ("type", "kind", "target_id", "user_id", "at", "count")
    made_or_refused(lambda: like.event_of(*(event[name] for name in names)), body, refused)


def check_counts(event, body=None, refused=None):
    made_or_refused(lambda: like.count_event_of(**event), body, refused)


def check_sets(event, body=None, refused=None):
    names = ("type", "kind", "target_id", "metric", "value", "at")
    made_or_refused(lambda: sets.set_event_of(*(event[name] for name in names)), body, refused)


def check_scores(low_bits, primary, low, score):
    try:
        packed = board.pack(int(primary), int(low), low_bits)
    except OverflowError:
        assert score is None
        return
    assert str(packed) == score
    assert board.unpack(float(score), low_bits) == (int(primary), int(low))


def check_periods(period, instant, time_zone, week_starts, name):
    at = datetime.datetime.fromisoformat(instant.replace("Z", "+00:00")).timestamp()
    assert board.period_of(period, at, time_zone, week_starts) == name


def main():
    failed = 0
    for check in (check_buckets, check_values, check_events, check_counts, check_sets, check_scores, check_periods):
        name = check.__name__.removeprefix("check_")
        vectors = json.loads((VECTORS / f"{name}.json").read_text())
        for vector in vectors:
            try:
                check(**vector)
            except Exception as error:
                failed += 1
                print(f"{name}: {json.dumps(vector)}: {error!r}", file=sys.stderr)
        print(f"{name}: {len(vectors)}")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
