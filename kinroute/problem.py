"""A sentence for the person at the terminal."""

from __future__ import annotations


class Problem(Exception):
    """Raised when a command cannot go on; the message is one plain sentence that says what to do.

    The command prints it to stderr without a traceback and exits with 1.
    """
