"""The authenticator of this edge, and what keeps its keys fresh while it runs."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping

import httpx

from configuration.reading import SettingsError
from edge.core.auth import Authenticator
from edge.core.types import Principal
from edge.identity import Seek, seek_nowhere
from edge.jwks import MIN_INTERVAL_S, Jwks
from edge.key_watch import WatchedFile
from edge.token_keys import jwt_rules, key_file, read_key_file
from edge.trust_settings import Jwt


class Authentication:
    """`seek` looks for keys that a token names, at most every `min_interval_s`. Making it raises SettingsError."""

    def __init__(
        self,
        jwt: Jwt | None,
        api_keys: Mapping[str, Principal],
        *,
        ends_s: Mapping[str, float] | None = None,
        anonymous: Principal | None = None,
        min_interval_s: float = MIN_INTERVAL_S,
    ) -> None:
        file = None if jwt is None else key_file(jwt)
        self._file = None if jwt is None or file is None else WatchedFile(file, lambda: read_key_file(jwt))
        self.authenticator = Authenticator(
            api_keys,
            None if jwt is None else jwt_rules(jwt),
            None if self._file is None else self._file.value,
            anonymous=anonymous,
            ends_s=ends_s,
        )
        self._jwks = None
        if jwt is not None and jwt.jwks_url is not None:
            self._jwks = Jwks(
                jwt.jwks_url,
                self.authenticator.use_token_keys,
                refresh_s=jwt.refresh_s,
                keep_stale_s=jwt.keep_stale_s,
                tls=_tls(jwt),
                min_interval_s=min_interval_s,
            )

    @property
    def seek(self) -> Seek:
        return seek_nowhere if self._jwks is None else self._jwks.seek

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self._file is not None:
                tasks.create_task(self._file.watch([self.authenticator.use_token_keys]))
            if self._jwks is not None:
                tasks.create_task(self._jwks.run())


def _tls(jwt: Jwt) -> ssl.SSLContext:
    if jwt.ca_file is None:
        return httpx.create_ssl_context(trust_env=False)
    try:
        return ssl.create_default_context(cafile=jwt.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise SettingsError(f"auth.jwt.ca_file is {str(jwt.ca_file)!r}: it holds no certificates ({error}).") from error
