"""Follows the recording stream of one edge, and again when the edge comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from kinroute.problem import Problem
from kinroute.recorder.told import ToldTurn, decode

PATH = "/kinroute/v1/recording"
AGAIN_S = 0.5
SILENCE_S = 15.0
"""An edge that lives says so more often."""
REFUSED = {
    401: "it wants a key that it knows: give one with --key-file",
    403: "the key needs the scope operator",
    404: "it has no recordings: is this the admin listener of an edge, and of this version?",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What every edge of one recording is asked for. `salt`: by which they tell a conversation alike."""

    salt: bytes
    block_tokens: int
    key: str | None

    @property
    def query(self) -> dict[str, str]:
        return {"salt": self.salt.hex(), "block_tokens": str(self.block_tokens)}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"} if self.key else {}


class Following:
    """One edge. `tell` hears of each turn and when it began, by the event loop's clock; `say` what people must know.

    `lost`: turns that the edge could not tell, since we were slow.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        url: str,
        asked: Asked,
        tell: Callable[[ToldTurn, float], None],
        say: Callable[[str], None],
    ) -> None:
        self._client = client
        self._url = url
        self._asked = asked
        self._tell = tell
        self._say = say
        self._was_followed = self._is_away = False
        self.lost = 0

    async def run(self) -> None:
        """Until cancelled. Raises Problem where the edge refuses, or does not answer at first."""
        while True:
            try:
                why = await self._follow()
            except httpx.TransportError as error:
                why = str(error) or type(error).__name__
            if not self._was_followed:
                raise Problem(f"The edge's admin listener at {self._url} does not answer: {why}.")
            if not self._is_away:
                self._is_away = True
                self._say(f"{self._url} is away ({why}): what ends there is not recorded until it is back.")
            await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> str:
        """Returns why it ended. Raises httpx.TransportError, or Problem."""
        url, asked = self._url, self._asked
        async with self._client.stream("GET", url + PATH, params=asked.query, headers=asked.headers) as response:
            status = response.status_code
            if status == 503 and self._was_followed:
                return "it has too many recordings"
            if status != 200:
                await response.aread()
                raise Problem(f"{url} refuses to be recorded ({status}): {REFUSED.get(status) or response.text[:300]}.")
            return await self._hear(response)

    async def _hear(self, response: httpx.Response) -> str:
        loop = asyncio.get_running_loop()
        began_s: float | None = None
        lost = 0
        async for line in response.aiter_lines():
            try:
                told = decode(line)
            except ValueError as error:
                raise Problem(f"{self._url} tells something else than a recording: {error}.") from error
            if isinstance(told, ToldTurn):
                if began_s is None:
                    raise Problem(f"{self._url} tells a turn before its clock.")
                self._tell(told, began_s + told.t_s)
                continue
            if began_s is None:
                began_s = loop.time() - told.now_s
                self._begun()
            if told.lost > lost:
                self._say(f"{self._url}: {told.lost - lost} requests are lost, for we were too slow.")
                self.lost += told.lost - lost
                lost = told.lost
            if told.over:
                return "it stops"
        return "its stream ended"

    def _begun(self) -> None:
        self._say(f"{self._url} is {'back' if self._is_away else 'followed'}.")
        self._was_followed, self._is_away = True, False
