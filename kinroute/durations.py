"""Times as people write and read them."""

from __future__ import annotations

import argparse
import datetime
import re

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def duration_s(text: str) -> float:
    """`90s`, `15m`, `12h`, `30d`, for argparse."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a number and s, m, h or d, such as 12h, not {text!r}")
    return float(int(match[1]) * UNITS_S[match[2]])


def at(unix_s: float, now_s: float) -> str:
    """`2026-01-31 12:00:00 UTC, in 3 days`"""
    try:
        stamp = datetime.datetime.fromtimestamp(unix_s, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return f"{unix_s}, which is no time"
    return f"{stamp}, {_away(unix_s - now_s)}"


def _away(distance_s: float) -> str:
    unit, each = next(
        (
            (name, each)
            for name, each in (("day", 86_400), ("hour", 3600), ("minute", 60))
            if abs(distance_s) >= 2 * each
        ),
        ("second", 1),
    )
    count = round(abs(distance_s) / each)
    words = f"{count} {unit}{'' if count == 1 else 's'}"
    return f"in {words}" if distance_s > 0 else f"{words} ago"
