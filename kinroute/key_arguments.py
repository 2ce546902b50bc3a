"""The arguments of `kinroute key` and `kinroute keys`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from kinroute import paths

Subcommands = Any
"""What argparse's add_subparsers gives; its type has no public name."""


def add_key_commands(commands: Subcommands) -> None:
    from kinroute.api_keys import name, scope, tenant_limits
    from kinroute.durations import duration_s

    key = _group(commands, "key", "API keys of callers: stored hashed, shown once.")
    create = _command(key, "create", _key_create, "Make a key and print it, this once.")
    create.add_argument("--tenant", type=name, default="default")
    create.add_argument("--subject", type=name, required=True, help="whom it speaks for: conversations are a subject's")
    create.add_argument("--scope", type=scope, action="append", default=[], help="affinity or operator; repeatable")
    create.add_argument("--limits", type=tenant_limits, metavar="NAME=N,…", help="instead of those of the settings")
    create.add_argument("--expires", type=duration_s, metavar="TIME", help="how long it works, such as 30d")
    _json(create)
    _json(_command(key, "list", _key_list, "Show who has keys, and no secrets."))
    rotate = _command(key, "rotate", _key_rotate, "Print a new key for the same tenant, subject and scopes.")
    rotate.add_argument("id")
    rotate.add_argument(
        "--grace", type=duration_s, default=0.0, metavar="TIME", help="how long the old one still works"
    )
    _json(rotate)
    revoke = _command(key, "revoke", _key_revoke, "Let a key stop working, everywhere, within seconds.")
    revoke.add_argument("id")

    keys = _group(commands, "keys", "The key file: what edges sign with.")
    _command(keys, "init", _keys_init, "Make a key file; one that is there is left alone.")
    pods = keys.add_parser(
        "init-secrets",
        help="Make the key files of a release as Secrets of Kubernetes; those that are there are left alone.",
        description="What the chart's Job runs before the first installation, as its pod's service account.",
    )
    pods.set_defaults(run=_keys_init_secrets)
    pods.add_argument("prefix", help="of the Secrets' names: PREFIX-keys, -worker-keys, -api-key, -group-token")
    pods.add_argument("--labels", type=_labels, default={}, metavar="JSON", help="of the Secrets that are made")
    turn = _command(keys, "rotate", _keys_rotate, "Add new signing keys; the old ones retire when they are not needed.")
    turn.add_argument("--sign-from-in", type=duration_s, metavar="TIME", help="when the new ones sign (default 5m)")
    turn.add_argument("--export-worker", type=Path, metavar="FILE", help="write the workers' key file too")
    _json(_command(keys, "list", _keys_list, "Show the signing keys, and no secrets."))
    export = _command(keys, "export-worker", _keys_export, "Write the key file of workers.")
    export.add_argument("file", type=Path, metavar="FILE")


def _group(commands: Subcommands, name: str, text: str) -> Subcommands:
    added = commands.add_parser(name, help=text, description=text)
    return added.add_subparsers(dest=f"{name}_command", required=True, metavar="COMMAND")


def _command(group: Subcommands, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    added: argparse.ArgumentParser = group.add_parser(name, help=text, description=text)
    added.set_defaults(run=run)
    added.add_argument(
        "--keys-file", type=Path, metavar="FILE", help="the edge's key file (default: the one of `kinroute up`)"
    )
    return added


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="as JSON")


def _file(arguments: argparse.Namespace) -> Path:
    return arguments.keys_file or paths.config_folder() / "keys.json"


def _key_create(arguments: argparse.Namespace) -> int:
    from edge.core.types import TenantLimits
    from kinroute.api_keys import create

    return create(
        _file(arguments),
        tenant=arguments.tenant,
        subject=arguments.subject,
        scopes=arguments.scope,
        limits=arguments.limits or TenantLimits(),
        life_s=arguments.expires,
        as_json=arguments.json,
    )


def _key_list(arguments: argparse.Namespace) -> int:
    from kinroute.api_keys import show

    return show(_file(arguments), as_json=arguments.json)


def _key_rotate(arguments: argparse.Namespace) -> int:
    from kinroute.api_keys import rotate

    return rotate(_file(arguments), arguments.id, grace_s=arguments.grace, as_json=arguments.json)


def _key_revoke(arguments: argparse.Namespace) -> int:
    from kinroute.api_keys import revoke

    return revoke(_file(arguments), arguments.id)


def _keys_init(arguments: argparse.Namespace) -> int:
    from kinroute.signing_keys import init

    return init(_file(arguments))


def _labels(text: str) -> dict[str, str]:
    from kinroute.cluster_secrets import labels

    return labels(text)


def _keys_init_secrets(arguments: argparse.Namespace) -> int:
    from kinroute.cluster_secrets import ACCOUNT, Cluster, init_secrets

    return init_secrets(Cluster.of_pod(os.environ, ACCOUNT, arguments.labels), arguments.prefix)


def _keys_rotate(arguments: argparse.Namespace) -> int:
    from kinroute.signing_keys import SIGN_FROM_IN_S, rotate

    sign_from_in_s = SIGN_FROM_IN_S if arguments.sign_from_in is None else arguments.sign_from_in
    return rotate(_file(arguments), sign_from_in_s=sign_from_in_s, worker_file=arguments.export_worker)


def _keys_list(arguments: argparse.Namespace) -> int:
    from kinroute.signing_keys import show

    return show(_file(arguments), as_json=arguments.json)


def _keys_export(arguments: argparse.Namespace) -> int:
    from kinroute.signing_keys import export_worker

    return export_worker(_file(arguments), arguments.file)
