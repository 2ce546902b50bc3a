"""What a trace may be refused for."""

from __future__ import annotations

from pathlib import Path


class TraceError(ValueError):
    """Raised where a file is no trace, or a damaged one. `line` counts from 1; 0 is no line in particular."""

    def __init__(self, file: Path | str, line: int, expected: str) -> None:
        super().__init__(file, line, expected)
        self.file = Path(file)
        self.line = line
        self.expected = expected

    def __str__(self) -> str:
        where = f"{self.file}, line {self.line}" if self.line else str(self.file)
        return f"{where}: expected {self.expected}"


def told(problem: Exception) -> str:
    """A decoder's complaint as the end of a sentence."""
    text = str(problem).replace("`", "'")
    return text[:1].lower() + text[1:].replace("$.", "")
