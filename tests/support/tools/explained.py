"""What `chainermn explain` knows of a job's output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from chainermn_tools.explain import (
    ErrorRule,
    Verdict,
    VerdictFinder,
    load_rules,
    search,
)
from tests.support.jobs.runner import Job

__all__ = ["VerdictFinder"]


def explained(said: Job | str, rules: Sequence[ErrorRule] | None = None) -> list[str]:
    """The names of the known errors in it, the first cause first."""
    text = said if isinstance(said, str) else said.out + said.err
    return [found.rule.name for found in search(io.BytesIO(text.encode()), rules)]


def verdict_on(said: Job | str) -> Verdict:
    """Who failed first, as it says."""
    text = said if isinstance(said, str) else said.out + said.err
    finder = VerdictFinder()
    search(io.BytesIO(text.encode()), finder=finder)
    found = finder.verdict()
    assert found, said
    return found


def rules_of(text: str) -> tuple[ErrorRule, ...]:
    """The rules that a file with this text has."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "rules.toml").write_text(text)
        return load_rules(Path(folder))
