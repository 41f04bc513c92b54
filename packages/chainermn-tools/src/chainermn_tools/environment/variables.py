"""The environment variables that change how MPI, the BLAS, the GPUs or Python behave."""

from __future__ import annotations

import os
import re

from chainermn_tools.jobs import influences_jobs

# A report is pasted in public places. Slurm, for one, may hold a token in SLURM_JWT.
SECRET = re.compile(r"AUTH|CREDENTIAL|JWT|KEY|PASS|SECRET|TOKEN")


def variables() -> dict[str, str]:
    """The variables that are set and matter, by name; the values of secret ones are hidden."""
    return {
        name: "(hidden)" if SECRET.search(name) else _printable(value)
        for name, value in sorted(os.environ.items())
        if influences_jobs(name)
    }


def _printable(value: str) -> str:
    """The value on one line, without control characters or bytes that are no text."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
