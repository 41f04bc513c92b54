"""How long calls may wait and hosts be silent, from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from ..environment import text_of

TIMEOUT_VARIABLE, SILENCE_VARIABLE = "CHAINERMN_TIMEOUT", "CHAINERMN_HOST_SILENCE"
DEFAULT_SECONDS = 600.0
SILENCE_SECONDS = 20.0  # TCP bridges shorter gaps, and so does MPI
# Less makes a busy machine stall every job; more, some thirty years, is a mistake.
SHORTEST, LONGEST = 1.0, 1e9


@dataclass(frozen=True)
class Timeout:
    """How long a call may wait, and what happens then."""

    # After which a waiting call is reported; 0 for never.
    seconds: float = DEFAULT_SECONDS
    ends_job: bool = False  # whether the job is ended then, and when a link is cut
    # Seconds without a sign of another host that mean a cut link, once calls wait as
    # long.
    silence: float = SILENCE_SECONDS

    def __str__(self) -> str:
        if not self.seconds:
            return "off"
        return f"{self.seconds:g} s" + (
            " and the end" if self.ends_job else " and a report"
        )


def timeout_from_env() -> Timeout:
    """Return what the environment asks for; ValueError where that is no number in the range."""
    silence = (
        _seconds(SILENCE_VARIABLE, f"the default of {SILENCE_SECONDS:g} s")
        or SILENCE_SECONDS
    )
    seconds = _seconds(
        TIMEOUT_VARIABLE,
        f"a report, and no end, of a call that has waited for {DEFAULT_SECONDS:g} s",
        or_zero=", or 0 for no limit",
    )
    return (
        Timeout(silence=silence)
        if seconds is None
        else Timeout(seconds, seconds > 0, silence)
    )


def _seconds(variable: str, default: str, or_zero: str = "") -> float | None:
    """Return the seconds that the environment asks for; None where it doesn't."""
    if not (text := text_of(variable)):
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not SHORTEST <= seconds <= LONGEST and not (or_zero and seconds == 0):
        raise ValueError(
            f"{variable} is {text!r}; use seconds from {SHORTEST:g} to {LONGEST:g}{or_zero}. If it "
            f"is not set, you get {default}"
        )
    return seconds
