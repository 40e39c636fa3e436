"""Leaderboards: the key of the current period, and the numbers in a score. docs/events.md has the scripts that write and read them."""

import datetime
import zoneinfo

SCORE_BITS = 53
DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")


def period_of(length, instant, time_zone="UTC", week_starts="monday"):
    """The name of the period that contains the instant, in seconds since 1970. A week has the name of the ISO week with
    most of its days."""
    day = datetime.datetime.fromtimestamp(instant, zoneinfo.ZoneInfo(time_zone)).date()
    if length == "week":
        shift = DAYS.index(week_starts)
        year, week, _ = (day - datetime.timedelta(days=shift if shift < 4 else shift - 7)).isocalendar()
        return f"{year}-W{week:02}"
    return {"day": f"{day:%Y-%m-%d}", "month": f"{day:%Y-%m}", "total": "total"}[length]


def board_key(name, period, key_prefix="tally:"):
    return f"{key_prefix}board:{{{name}}}:{period}"


def board_keys(name, periods, instant, key_prefix="tally:"):
    """The keys of a board's periods that contain the instant: lua/board.lua adds to all of them in one call."""
    return [board_key(name, period_of(period, instant), key_prefix) for period in periods]


def pack(primary, low, low_bits):
    """The score that lua/board.lua writes: two numbers in the 53 bits that a double holds exactly. For a plain board, low_bits is 0."""
    if not 0 <= low < 2**low_bits or not 0 <= primary < 2 ** (SCORE_BITS - low_bits):
        raise OverflowError(f"{primary} and {low} do not fit")
    return primary * 2**low_bits + low


def unpack(score, low_bits):
    """The two numbers of a score."""
    return divmod(int(score), 2**low_bits)
