"""An issuer's keys by URL: fetched at the start, then in the background, and when a token names a key that is new."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable

import httpx
import structlog

from edge.core.errors import Code, EdgeError
from edge.core.jwt_keys import KeysError, KeySet, jwks_keys

MIN_INTERVAL_S = 10.0
DEADLINE_S = 5.0
MAX_BYTES = 1 << 20
MAX_WAITING = 64
MAX_ABSENT = 1024

log = structlog.get_logger()


class FetchError(Exception):
    """Raised when the keys could not be fetched; the message is for the log."""


class Jwks:
    """`use` is told of the keys whenever they change, on the event loop: of none, too, once they are older than
    `keep_stale_s`.

    However many tokens name unknown keys, two fetches are at least `min_interval_s` apart. Which ids the last one did
    not show is remembered for as long: issuers may sign with a key before all of their caches publish it.
    """

    def __init__(
        self,
        url: str,
        use: Callable[[KeySet], None],
        *,
        refresh_s: float,
        keep_stale_s: float,
        tls: ssl.SSLContext,
        min_interval_s: float = MIN_INTERVAL_S,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._url = url
        self._use = use
        self._refresh_s = refresh_s
        self._keep_stale_s = keep_stale_s
        self._tls = tls
        self._min_interval_s = min_interval_s
        self._deadline_s = deadline_s
        self._keys = KeySet()
        self._fetched_s: float | None = None
        self._failed = False
        self._sought: dict[str, asyncio.Future[None]] = {}
        self._waiting = 0
        self._absent: set[str] = set()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Keep the keys fresh, until cancelled."""
        async with httpx.AsyncClient(verify=self._tls, trust_env=False, timeout=self._deadline_s) as client:
            while True:
                self._wanted.clear()
                before = set(self._sought)
                began_s = time.monotonic()
                await self._refresh(client)
                self._tell(before)
                await asyncio.sleep(self._min_interval_s)
                self._absent.clear()
                self._forget_stale()
                if self._failed:
                    continue
                rest_s = self._refresh_s - (time.monotonic() - began_s)
                try:
                    async with asyncio.timeout(max(0.0, rest_s)):
                        await self._wanted.wait()
                except TimeoutError:
                    continue

    async def seek(self, kid: str) -> bool:
        """Wait for a fetch that shows the key `kid`, or does not; False: no key is new.

        Raises EdgeError where the token cannot be judged now: there are no keys at all, or too many wait already.
        """
        before = self._keys
        if kid not in self._absent:
            if self._waiting >= MAX_WAITING:
                raise self._not_now("too many unknown keys")
            sought = self._sought.get(kid)
            if sought is None:
                sought = self._sought[kid] = asyncio.get_running_loop().create_future()
            self._waiting += 1
            self._wanted.set()
            try:
                # It is shared with others who seek the same key.
                await asyncio.shield(sought)
            finally:
                self._waiting -= 1
        if not self._keys.keys:
            raise self._not_now("no keys")
        return self._keys is not before

    def _not_now(self, reason: str) -> EdgeError:
        message = "Tokens of this key cannot be checked now."
        return EdgeError(Code.OVERLOADED, message, retryable=True, retry_after_s=self._min_interval_s, reason=reason)

    async def _refresh(self, client: httpx.AsyncClient) -> None:
        try:
            keys = await self._fetch(client)
        except (FetchError, KeysError) as error:
            self._failed = True
            log.warning(
                "the keys of tokens cannot be fetched", url=self._url, why=str(error), kept=len(self._keys.keys)
            )
            return
        self._failed = False
        self._fetched_s = time.monotonic()
        if keys == self._keys:
            return
        self._keys = keys
        self._use(keys)
        ids = [key.kid for key in keys.keys]
        log.info("the keys of tokens are new", url=self._url, ids=ids, skipped=list(keys.skipped))

    async def _fetch(self, client: httpx.AsyncClient) -> KeySet:
        """Raises FetchError and KeysError."""
        found = bytearray()
        headers = {"accept": "application/jwk-set+json, application/json", "accept-encoding": "identity"}
        try:
            async with (
                asyncio.timeout(self._deadline_s),
                client.stream("GET", self._url, headers=headers, follow_redirects=False) as response,
            ):
                if response.status_code != 200:
                    raise FetchError(f"it answers {response.status_code}")
                if response.headers.get("content-encoding", "identity") != "identity":
                    raise FetchError("its answer is encoded, which was not asked for")
                async for piece in response.aiter_raw():
                    found += piece
                    if len(found) > MAX_BYTES:
                        raise FetchError(f"its answer has more than {MAX_BYTES} bytes")
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise FetchError(str(error) or type(error).__name__) from error
        return jwks_keys(bytes(found), secrets_allowed=False)

    def _tell(self, before: set[str]) -> None:
        """Those who wait learn what the fetch showed; who came while it ran goes on waiting unless its key is there."""
        self._absent.clear()
        for kid in list(self._sought):
            if self._keys.names(kid) or kid in before or not self._keys.keys:
                self._sought.pop(kid).set_result(None)
                if not self._failed and len(self._absent) < MAX_ABSENT and not self._keys.names(kid):
                    self._absent.add(kid)
        if self._sought:
            self._wanted.set()

    def _forget_stale(self) -> None:
        if self._fetched_s is None or not self._failed or time.monotonic() - self._fetched_s < self._keep_stale_s:
            return
        self._fetched_s = None
        self._keys = KeySet()
        self._use(self._keys)
        log.error("the keys of tokens are too old to be believed", url=self._url, keep_stale_s=self._keep_stale_s)
