"""What `chainermn explain` knows of a job's output."""

from __future__ import annotations

import io
from collections.abc import Sequence

from chainermn_tools.explain import ErrorRule, load_rules, search
from tests.support.jobs import Job

__all__ = ["explained", "load_rules"]


def explained(said: Job | str, rules: Sequence[ErrorRule] | None = None) -> list[str]:
    """The names of the known errors in it, the first cause first."""
    text = said if isinstance(said, str) else said.out + said.err
    return [found.rule.name for found in search(io.BytesIO(text.encode()), rules)]
