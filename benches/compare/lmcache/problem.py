"""What stops a comparison."""

import re

N_LAST_LINES = 15
COLOR = re.compile(r"\x1b\[[0-9;]*m")


class Problem(Exception):
    """Something is missing or failed; the text says what and what to do."""


def last_lines(text: str, n_lines: int = N_LAST_LINES) -> str:
    """The end of a log, indented, to stand below a message."""
    lines = [line for line in COLOR.sub("", text).splitlines() if line.strip()][-n_lines:]
    return "\n".join(f"    {line}" for line in lines) or "    (nothing was written)"
