"""Chromium without a window, spoken to through two pipes: the DevTools protocol, messages that end with a NUL."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
)  # fmt: skip
DEADLINE_S = 30.0


class Page:
    """One page. `events`: what it told since it was opened, as (method, parameters)."""

    def __init__(self, profile: Path) -> None:
        """`profile`: a folder that is this browser's alone."""
        assert CHROMIUM is not None
        hears, self._says = os.pipe()
        self._hears, says = os.pipe()
        # The protocol's pipes are descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{hears} 4>&{says}'
        self._process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"],
            pass_fds=(hears, says),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(hears)
        os.close(says)
        self._numbers = itertools.count(1)
        self._heard = b""
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._session: str | None = None

    def __enter__(self) -> Self:
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        with contextlib.suppress(OSError, TimeoutError, AssertionError):
            self.ask("Browser.close")
        try:
            self._process.wait(timeout=10)
        finally:
            self._process.kill()
            self._process.wait()
            os.close(self._says)
            os.close(self._hears)

    def open(self, file: Path, *, width: int, dark: bool = False) -> None:
        """Until it is loaded, scripts included."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.ask("Page.navigate", url=file.as_uri())
        self._until(lambda: any(method == "Page.loadEventFired" for method, _ in self.events))

    def value(self, script: str) -> Any:
        """What this expression of JavaScript comes to."""
        return self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)["result"]["value"]

    def picture(self, file: Path) -> None:
        """All of the page, as PNG."""
        shot = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._says, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
        raise TimeoutError(method)

    def _until(self, is_so: Any) -> None:
        for _ in self._messages():
            if is_so():
                return
        raise TimeoutError

    def _messages(self) -> Iterator[dict[str, Any]]:
        """As they come, events among them; ends when it takes too long."""
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            message, end, rest = self._heard.partition(b"\0")
            if end:
                self._heard = rest
                found: dict[str, Any] = json.loads(message)
                if "method" in found:
                    self.events.append((found["method"], found.get("params", {})))
                yield found
                continue
            ready, _, _ = select.select([self._hears], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(self._hears, 1 << 20) if ready else b""
            if not chunk:
                return
            self._heard += chunk
