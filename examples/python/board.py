"""Leaderboards: computes the keys of periods, and packs two numbers into a score. docs/scripts.md has the scripts for
leaderboards."""

import datetime
import zoneinfo

SCORE_BITS = 53
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def period_of(length, instant, time_zone="UTC", week_starts="monday"):
    """Returns the name of the period that contains an instant in seconds since 1970. A week is named after the ISO week
    that has most of its days."""
    day = datetime.datetime.fromtimestamp(instant, zoneinfo.ZoneInfo(time_zone)).date()
    if length == "week":
        shift = DAYS.index(week_starts)
        year, week, _ = (day - datetime.timedelta(days=shift if shift < 4 else shift - 7)).isocalendar()
        return f"{year}-W{week:02}"
    return {"day": f"{day:%Y-%m-%d}", "month": f"{day:%Y-%m}", "total": "total"}[length]


def board_key(name, period, key_prefix="tally:"):
    return f"{key_prefix}board:{{{name}}}:{period}"


def board_keys(name, periods, instant, key_prefix="tally:"):
    """Returns the keys of a board's periods that contain the instant. One call of lua/board.lua adds to all these
    keys."""
    return [board_key(name, period_of(period, instant), key_prefix) for period in periods]


def pack(primary, low, low_bits):
    """Packs two numbers into a score, as lua/board.lua does: into the 53 bits that a double holds exactly. For a plain
    board, low_bits is 0."""
    if not 0 <= low < 2**low_bits or not 0 <= primary < 2 ** (SCORE_BITS - low_bits):
        raise OverflowError(f"{primary} and {low} do not fit into a score")
    return primary * 2**low_bits + low


def unpack(score, low_bits):
    """Returns the two numbers in a score."""
    return divmod(int(score), 2**low_bits)
