"""How long calls may wait and hosts be silent, from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import text_of

TIMEOUT_VARIABLE = "CHAINERMN_TIMEOUT"
SILENCE_VARIABLE = "CHAINERMN_HOST_SILENCE"
DEFAULT_SECONDS = 600.0
SILENCE_SECONDS = 20.0  # TCP bridges shorter gaps, and so does MPI
# Less makes a busy machine stall every job; more, some thirty years, is a mistake.
SHORTEST = 1.0
LONGEST = 1e9


@dataclass(frozen=True)
class Timeout:
    """How long a call may wait, and what happens then."""

    # After which a waiting call is reported; 0 for never.
    seconds: float = DEFAULT_SECONDS
    ends_job: bool = False  # whether the job is ended then
    # Seconds after which a host that acknowledges nothing counts as lost. A call that
    # waits for its ranks is then reported after as long.
    silence: float = SILENCE_SECONDS

    def __str__(self) -> str:
        if not self.seconds:
            return "off"
        if self.ends_job:
            return f"{self.seconds:g} s and the end"
        return f"{self.seconds:g} s and a report"


def timeout_from_env() -> Timeout:
    """Return what the environment asks for; ValueError where that is no number in the range."""
    silence = _seconds(
        SILENCE_VARIABLE, default=f"the default of {SILENCE_SECONDS:g} s"
    )
    seconds = _seconds(
        TIMEOUT_VARIABLE,
        default=f"a report, and no end, of a call that has waited for {DEFAULT_SECONDS:g} s",
        may_be_zero=True,
    )
    if silence is None:
        silence = SILENCE_SECONDS
    if seconds is None:
        return Timeout(silence=silence)
    return Timeout(seconds, seconds > 0, silence)


def _seconds(variable: str, default: str, may_be_zero: bool = False) -> float | None:
    """Return the seconds that a variable asks for; None where it isn't set."""
    text = text_of(variable)
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if SHORTEST <= seconds <= LONGEST or (may_be_zero and seconds == 0):
        return seconds
    zero = ", or 0 for no limit" if may_be_zero else ""
    raise ValueError(
        f"{variable} is {text!r}; use seconds from {SHORTEST:g} to {LONGEST:g}{zero}. If it "
        f"is not set, you get {default}"
    )
