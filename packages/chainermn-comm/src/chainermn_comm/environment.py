"""The environment variables that users set: reads them, and refuses malformed values."""

from __future__ import annotations

import contextlib
import os

from _chainermn_events import GRACE_VARIABLE

ABORT_VARIABLE = "CHAINERMN_FORCE_ABORT_ON_EXCEPTION"
ALONE_VARIABLE = "CHAINERMN_ALLOW_ALONE"
# Read when Python starts, where only 1 means on.
_START_UP = ("CHAINERMN_USE_BUNDLED", "CHAINERMN_NO_COMPAT")
# The range of times. Shorter times make no sense, and longer ones (some thirty years)
# are mistakes.
LEAST_SECONDS = 1e-3
MOST_SECONDS = 1e9
_OFF = ("0", "false", "no", "off")
_ON = ("1", "true", "yes", "on")


def text_of(variable: str) -> str:
    """Return a variable's text without spaces around it; an empty text if it isn't set."""
    return os.environ.get(variable, "").strip()


def seconds(
    variable: str, default: float, least: float = LEAST_SECONDS, zero: str = ""
) -> float:
    """Return a time in seconds; raise ValueError unless it is in the range.

    0 is in the range only if ``zero`` tells its meaning.
    """
    text = text_of(variable)
    with contextlib.suppress(ValueError):
        number = float(text or default)
        if least <= number <= MOST_SECONDS or (zero and number == 0):
            return number
    raise ValueError(
        f"{variable} is {text!r}; use seconds from {least:g} to {MOST_SECONDS:g}{zero}"
    )


def switch(variable: str) -> bool | None:
    """Return whether a variable is on, or None if it isn't set; ValueError for other values."""
    text = text_of(variable)
    if text.lower() in _OFF:
        return False
    if text.lower() in _ON:
        return True
    if text:
        raise ValueError(f"{variable} must be 1 or 0, got {text!r}")
    return None


def check() -> None:
    """Raise ValueError if a variable that no setting reads is malformed."""
    seconds(GRACE_VARIABLE, default=1)
    for variable in (ABORT_VARIABLE, ALONE_VARIABLE):
        switch(variable)
    for variable in _START_UP:
        text = text_of(variable)
        if text not in ("", "0", "1"):
            raise ValueError(f"{variable} must be 1 or 0, got {text!r}")
