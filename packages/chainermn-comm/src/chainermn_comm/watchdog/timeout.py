"""How long calls may wait and hosts be silent, from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import seconds, text_of

TIMEOUT_VARIABLE = "CHAINERMN_TIMEOUT"
SILENCE_VARIABLE = "CHAINERMN_HOST_SILENCE"
DEFAULT_SECONDS = 600.0
SILENCE_SECONDS = 20.0  # TCP and MPI bridge shorter gaps
# With less, a busy machine would end jobs that are only slow.
SHORTEST = 1.0


@dataclass(frozen=True)
class Timeout:
    """How long a call may wait, and whether the job is ended then."""

    # The time after which a waiting call is reported; 0 for never.
    seconds: float = DEFAULT_SECONDS
    ends_job: bool = False  # whether the job is ended then
    # Seconds after which a host that acknowledges nothing counts as lost. After the
    # same time, a call that waits for the host's ranks is reported.
    silence: float = SILENCE_SECONDS

    def __str__(self) -> str:
        if not self.seconds:
            return "off"
        if self.ends_job:
            return f"{self.seconds:g} s and the end"
        return f"{self.seconds:g} s and a report"


def timeout_from_env() -> Timeout:
    """Return the environment's time-outs; ValueError if one is no number in the range."""
    limit = seconds(TIMEOUT_VARIABLE, DEFAULT_SECONDS, SHORTEST, ", or 0 for no limit")
    is_set = bool(text_of(TIMEOUT_VARIABLE))
    return Timeout(
        seconds=limit,
        ends_job=is_set and limit > 0,
        silence=seconds(SILENCE_VARIABLE, SILENCE_SECONDS, SHORTEST),
    )
