"""What `chainermn explain` knows of a job's output."""

from __future__ import annotations

import io

from chainermn_tools.explain import search
from tests.support.jobs import Job


def explained(said: Job | str) -> list[str]:
    """The names of the known errors in it, the first cause first."""
    text = said if isinstance(said, str) else said.out + said.err
    return [found.rule.name for found in search(io.BytesIO(text.encode()))]
