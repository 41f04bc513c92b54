"""How long a call may wait, from the environment variable CHAINERMN_TIMEOUT."""

from __future__ import annotations

import os
from dataclasses import dataclass

TIMEOUT_VARIABLE = "CHAINERMN_TIMEOUT"
DEFAULT_SECONDS = 600.0
SILENCE_SECONDS = 20.0  # TCP bridges shorter gaps, and so does MPI
# Less makes a busy machine stall every job; more, some thirty years, is a mistake.
SHORTEST, LONGEST = 1.0, 1e9


@dataclass(frozen=True)
class Timeout:
    """How long a call may wait, and what happens then."""

    seconds: float = DEFAULT_SECONDS  # after which a waiting call is reported; 0 for never
    ends_job: bool = False  # whether the job is ended then, and when a link is cut
    # Seconds without a heartbeat of another host's monitor that mean a cut link.
    silence: float = SILENCE_SECONDS

    def __str__(self) -> str:
        if not self.seconds:
            return "off"
        return f"{self.seconds:g} s" + (" and the end" if self.ends_job else " and a report")


NO_TIMEOUT = Timeout(0.0)


def timeout_from_env() -> Timeout:
    """Return what the environment asks for; ValueError where that is no number in the range."""
    text = os.environ.get(TIMEOUT_VARIABLE, "").strip()
    if not text:
        return Timeout()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not SHORTEST <= seconds <= LONGEST:
        raise ValueError(
            f"{TIMEOUT_VARIABLE} is {text!r}; use seconds from {SHORTEST:g} to {LONGEST:g}, or 0 "
            "for no limit. If it is not set, a waiting call is reported after "
            f"{DEFAULT_SECONDS:g} s and the job goes on"
        )
    return Timeout(seconds, ends_job=seconds > 0)
