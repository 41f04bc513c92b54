"""How long a call may wait, and what happens then."""

from __future__ import annotations

import os
from dataclasses import dataclass

VARIABLE = "CHAINERMN_TIMEOUT"
DEFAULT_SECONDS = 600.0
SILENCE_SECONDS = 20.0
# Below a second a busy machine stalls every job; above, some thirty years, is a mistake.
SHORTEST, LONGEST = 1.0, 1e9


@dataclass(frozen=True)
class Limit:
    """The longest wait.

    Attributes:
        seconds: after which a waiting call is reported; 0 for never.
        ends_job: whether the job is ended then, and when a link is cut.
        silence: of another machine's monitor that means a cut link. TCP bridges shorter ones, and
            so does MPI.
    """

    seconds: float = DEFAULT_SECONDS
    ends_job: bool = False
    silence: float = SILENCE_SECONDS

    def __str__(self) -> str:
        if not self.seconds:
            return "off"
        return f"{self.seconds:g} s" + (" and the end" if self.ends_job else " and a report")


NO_LIMIT = Limit(0.0)


def limit() -> Limit:
    """What the environment asks for.

    Raises:
        ValueError: the variable has a value that can't be one.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return Limit()
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if seconds != 0 and not SHORTEST <= seconds <= LONGEST:
        raise ValueError(
            f"{VARIABLE} must be the seconds that a call may wait before the job is ended, from "
            f"{SHORTEST:g} to {LONGEST:g}, or 0 for no limit, got {text!r}; unset it for a report "
            f"after {DEFAULT_SECONDS:g} s and no end"
        )
    return Limit(seconds, ends_job=seconds > 0)
