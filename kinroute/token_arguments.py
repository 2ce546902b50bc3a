"""The arguments of `kinroute token`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from kinroute import paths
from kinroute.durations import duration_s

MAX_TOKEN_CHARS = 65_536


def add_token_commands(commands: Any) -> None:
    text = "Make test tokens, and look into tokens."
    tokens = commands.add_parser("token", help=text, description=text).add_subparsers(
        dest="token_command", required=True, metavar="COMMAND"
    )
    mint = _added(tokens, "mint", _mint, "Print a JWT signed with a key of yours.")
    one = mint.add_mutually_exclusive_group(required=True)
    one.add_argument("--secret-file", type=Path, metavar="FILE", help="a shared secret")
    one.add_argument("--key-file", type=Path, metavar="FILE", help="a private key in PEM")
    one.add_argument("--jwks-file", type=Path, metavar="FILE", help="a JWKS with a private key")
    mint.add_argument("--alg", metavar="NAME", help="default: the first that the key fits, such as RS256")
    mint.add_argument("--kid", help="the key's name in the header; of a JWKS, which key signs")
    mint.add_argument("--tenant")
    mint.add_argument("--subject", required=True)
    mint.add_argument("--scope", action="append", default=[], help="repeatable")
    mint.add_argument("--expires", type=duration_s, default=3600.0, metavar="TIME", help="default 1h")
    mint.add_argument("--issuer")
    mint.add_argument("--audience")
    mint.add_argument(
        "--claim", type=_claim, action="append", default=[], metavar="NAME=VALUE", help="VALUE: JSON or text"
    )
    look = _added(tokens, "inspect", _inspect, "Show what a JWT says and whether it is believed: exit code 0, or 1.")
    _token(look)
    which = look.add_mutually_exclusive_group()
    which.add_argument("--secret-file", type=Path, metavar="FILE")
    which.add_argument("--public-key-file", type=Path, metavar="FILE", help="PEM")
    which.add_argument("--jwks-file", type=Path, metavar="FILE")
    which.add_argument("--config", type=Path, metavar="FILE", help="an edge's: its keys and its rules")
    look.add_argument("--issuer", help="what the token must have")
    look.add_argument("--audience", help="what the token must have")

    text = "Tokens that prove a parent, with the edge's own keys."
    lineage = tokens.add_parser("lineage", help=text, description=text).add_subparsers(
        dest="lineage_command", required=True, metavar="COMMAND"
    )
    give = _added(lineage, "mint", _lineage_mint, "Print the lineage token of a conversation.")
    give.add_argument("--tenant", default="default")
    give.add_argument("--subject", required=True, help="who names the conversation so")
    give.add_argument("--conversation", required=True, help="its id, as the subject writes it")
    give.add_argument("--depth", type=int, default=0)
    give.add_argument("--expires", type=duration_s, default=86_400.0, metavar="TIME", help="default 24h, the most")
    read = _added(lineage, "inspect", _lineage_inspect, "Show what a lineage token states, and whether it is believed.")
    _token(read)
    read.add_argument("--tenant", help="who sends it (default: whose it is)")
    for command in (give, read):
        command.add_argument("--keys-file", type=Path, metavar="FILE", help="default: the one of `kinroute up`")


def _added(group: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
    added.set_defaults(run=run)
    return added


def _token(command: argparse.ArgumentParser) -> None:
    command.add_argument("token", nargs="?", default="-", help="without it, or with -, it is read from stdin")


def _given(arguments: argparse.Namespace) -> str:
    token: str = sys.stdin.read(MAX_TOKEN_CHARS) if arguments.token == "-" else arguments.token  # noqa: S105 - no secret
    return token.strip().removeprefix("Bearer ").strip()


def _claim(text: str) -> tuple[str, Any]:
    from kinroute.tokens import claim

    try:
        return claim(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, not {text!r}") from None


def _keys_file(arguments: argparse.Namespace) -> Path:
    return arguments.keys_file or paths.config_folder() / "keys.json"


def _mint(arguments: argparse.Namespace) -> int:
    from kinroute.tokens import KeySource, Wanted, mint

    named = {"iss": arguments.issuer, "aud": arguments.audience}
    claims = {name: value for name, value in named.items() if value is not None} | dict(arguments.claim)
    return mint(
        KeySource(arguments.secret_file, arguments.key_file, arguments.jwks_file),
        Wanted(arguments.tenant, arguments.subject, arguments.scope, arguments.expires, claims),
        algorithm=arguments.alg,
        kid=arguments.kid,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from kinroute.tokens import KeySource, inspect

    return inspect(
        _given(arguments),
        KeySource(arguments.secret_file, arguments.public_key_file, arguments.jwks_file),
        config=arguments.config,
        issuer=arguments.issuer,
        audience=arguments.audience,
    )


def _lineage_mint(arguments: argparse.Namespace) -> int:
    from kinroute.lineage_tokens import mint

    return mint(
        _keys_file(arguments),
        tenant=arguments.tenant,
        subject=arguments.subject,
        conversation=arguments.conversation,
        depth=arguments.depth,
        life_s=arguments.expires,
    )


def _lineage_inspect(arguments: argparse.Namespace) -> int:
    from kinroute.lineage_tokens import inspect

    return inspect(_given(arguments), _keys_file(arguments), tenant=arguments.tenant)
