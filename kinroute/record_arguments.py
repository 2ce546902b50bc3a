"""The arguments of `kinroute record`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kinroute.problem import Problem

USUAL_BLOCK_TOKENS = 64
MAX_BLOCK_TOKENS = 65_536


def add_record_command(commands: Any) -> None:
    text = "Record the traffic of running edges as a trace, without any text in it. Ctrl-C ends it and writes."
    added = commands.add_parser("record", help=text, description=text)
    added.set_defaults(run=_record)
    added.add_argument("out", type=Path, metavar="OUT", help="the trace file; gzipped where it ends in .gz")
    added.add_argument(
        "--url",
        type=_url,
        action="append",
        default=[],
        metavar="ADMIN",
        help="the admin listener of an edge, http://HOST:PORT; repeatable (default: that of `kinroute up` here)",
    )
    which = added.add_mutually_exclusive_group()
    which.add_argument("--key", help="a key with the scope operator; none is needed on loopback")
    which.add_argument("--key-file", type=Path, metavar="FILE", help="the same, from a file")
    added.add_argument("--ca-file", type=Path, metavar="FILE", help="certificates to trust, for https")
    added.add_argument("--requests", type=_count, metavar="N", help="end after so many")
    added.add_argument("--seconds", type=_seconds, metavar="S", help="end after so long")
    added.add_argument(
        "--block-tokens",
        type=_block_tokens,
        default=USUAL_BLOCK_TOKENS,
        metavar="N",
        help=f"tokens of a block (default {USUAL_BLOCK_TOKENS}); a worker's own tokens_per_block shows most",
    )


def _record(arguments: argparse.Namespace) -> int:
    from kinroute.recorder.command import Recorded, record

    return record(
        Recorded(
            arguments.url or [_url_here()],
            arguments.out,
            _key(arguments),
            arguments.requests,
            arguments.seconds,
            arguments.block_tokens,
            arguments.ca_file,
        )
    )


def _url_here() -> str:
    from kinroute.up import read_note

    url = read_note().get("admin")
    if not isinstance(url, str):
        raise Problem("Kinroute does not run here: start it with scripts/run, or name an admin listener with --url.")
    return url


def _key(arguments: argparse.Namespace) -> str | None:
    key: str | None = arguments.key
    if arguments.key_file is not None:
        try:
            key = arguments.key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise Problem(f"{arguments.key_file} is no key that can be read: {error}.") from error
    if key is not None and not (key and key.isascii() and key.isprintable()):
        raise Problem("The key must be one line of printable ASCII.")
    return key


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_one = False
    if not is_one or parts.query or parts.fragment or parts.path.strip("/"):
        raise argparse.ArgumentTypeError(f"must be http://HOST:PORT or https://HOST:PORT, not {text!r}")
    return text.rstrip("/")


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 18 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text!r}")
    return int(text)


def _block_tokens(text: str) -> int:
    count = _count(text)
    if count > MAX_BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_BLOCK_TOKENS}, not {text}")
    return count


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, not {text!r}")
    return seconds
