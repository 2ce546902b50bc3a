"""A sentence for the person at the terminal."""

from __future__ import annotations


class Problem(Exception):
    """Raised when a command cannot go on; the message is one plain sentence that says what to do.

    The command prints it to stderr without a traceback and exits with `exit_code`.
    """

    exit_code = 1


class Misuse(Problem):
    """Raised when what was asked for cannot be, whatever is tried: an argument's value, a file that is damaged."""

    exit_code = 2
