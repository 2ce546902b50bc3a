"""`kinroute keys init-secrets`: the key files of a release, made once as Secrets of Kubernetes and never changed.

    PREFIX-api-key      api-key           the first API key: tenant default, subject first, scope affinity
    PREFIX-keys         keys.json         every edge's key file, which knows that key's hash
    PREFIX-worker-keys  worker-keys.json  the envelope keys in it, for workers
    PREFIX-group-token  token             shared by the ranks of a worker on several hosts

A Secret that is there is read and left alone, so it does not matter how often this runs, or where it was interrupted.
"""

from __future__ import annotations

import base64
import json
import secrets
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from edge.core.types import Scope
from edge.keyring import ApiKey, Keyring, KeyringError, digest_of, new_api_key, new_id
from kinroute.problem import Problem

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 20.0
NAMES = ("api-key", "keys", "worker-keys", "group-token")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Secrets of one namespace, over Kubernetes' API."""

    client: httpx.Client
    namespace: str
    labels: Mapping[str, str]

    @classmethod
    def of_pod(cls, environment: Mapping[str, str], account: Path, labels: Mapping[str, str]) -> Cluster:
        """As the service account of this pod. Raises Problem where this is no pod."""
        try:
            host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT_HTTPS"]
            token, namespace = (account / "token").read_text(), (account / "namespace").read_text()
            verify = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except (KeyError, OSError) as error:
            raise Problem(
                f"This is no pod with a service account ({error}): run it as the chart's Job does."
            ) from error
        host = f"[{host}]" if ":" in host else host
        headers = {"Authorization": f"Bearer {token.strip()}"}
        client = httpx.Client(
            base_url=f"https://{host}:{port}", headers=headers, verify=verify, timeout=TIMEOUT_S, trust_env=False
        )
        return cls(client, namespace.strip(), labels)

    def keep(self, name: str, member: str, make: Callable[[], bytes]) -> bytes:
        """What `member` of the Secret `name` holds; where there is no such Secret, one with what `make` gives.

        Raises Problem.
        """
        found = self._read(name, member)
        if found is not None:
            sys.stdout.write(f"{name} is there already: it is left alone\n")
            return found
        data = make()
        body = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "Opaque",
            "metadata": {"name": name, "labels": dict(self.labels)},
            "data": {member: base64.b64encode(data).decode()},
        }
        answer = self._call("POST", self._path, body)
        if answer.status_code == httpx.codes.CONFLICT:
            # Another one was faster: its keys count.
            found = self._read(name, member)
            if found is None:
                raise Problem(f"The Secret {name} was there and is gone: run it again.")
            return found
        self._require(answer, f"The Secret {name} cannot be made")
        sys.stdout.write(f"{name} is made\n")
        return data

    def _read(self, name: str, member: str) -> bytes | None:
        answer = self._call("GET", f"{self._path}/{name}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        self._require(answer, f"The Secret {name} cannot be read")
        try:
            return base64.b64decode(answer.json()["data"][member], validate=True)
        except (KeyError, TypeError, ValueError) as error:
            raise Problem(f"The Secret {name} holds no {member}: delete it, or add that.") from error

    @property
    def _path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/secrets"

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        try:
            return self.client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise Problem(f"Kubernetes' API at {self.client.base_url} does not answer: {error!r}.") from error

    @staticmethod
    def _require(answer: httpx.Response, failed: str) -> None:
        if not answer.is_success:
            try:
                why = str(answer.json()["message"])
            except (KeyError, TypeError, ValueError):
                why = answer.text[:200]
            raise Problem(f"{failed}: {answer.status_code} {why}")


def init_secrets(cluster: Cluster, prefix: str) -> int:
    """Make those of `NAMES` that are not there. Raises Problem."""
    made_key = cluster.keep(f"{prefix}-api-key", "api-key", lambda: new_api_key().encode()).decode()
    with tempfile.TemporaryDirectory() as scratch:
        file, worker_file = Path(scratch) / "keys.json", Path(scratch) / "worker-keys.json"
        try:
            content = cluster.keep(f"{prefix}-keys", file.name, lambda: _key_file(file, made_key))
            file.touch(mode=0o600)
            file.write_bytes(content)
            Keyring.load(file).write_worker_keys(worker_file)
        except (KeyringError, OSError) as error:
            raise Problem(str(error)) from error
        cluster.keep(f"{prefix}-worker-keys", worker_file.name, worker_file.read_bytes)
    cluster.keep(f"{prefix}-group-token", "token", lambda: secrets.token_hex(32).encode())
    return 0


def _key_file(file: Path, api_key: str) -> bytes:
    """Of a new key file that lets `api_key` in."""
    Keyring.create(file)
    first = ApiKey(new_id(), digest_of(api_key), "default", "first", (Scope.AFFINITY.value,), time.time())
    Keyring.change(file, lambda content: msgspec.structs.replace(content, api_keys=(*content.api_keys, first)))
    return file.read_bytes()


def labels(text: str) -> dict[str, str]:
    """Of a JSON object of texts. Raises ValueError."""
    found = json.loads(text)
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError("must be a JSON object of texts")
    return found
