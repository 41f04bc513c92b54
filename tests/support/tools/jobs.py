"""Jobs as the tools see them: how they end, and what `chainermn explain` finds in their output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from chainermn_tools.explain import ErrorRule, Findings, Verdict, load_rules, search
from chainermn_tools.jobs import Event, JobOutput
from chainermn_tools.jobs.events import find_lost
from tests.support.jobs.runner import Job

__all__ = ["Event", "JobOutput", "find_lost"]


def findings_in(said: Job | str, rules: Sequence[ErrorRule] | None = None) -> Findings:
    if isinstance(said, Job):
        said = said.out + said.err
    return search(io.BytesIO(said.encode(errors="surrogateescape")), rules)


def explained(said: Job | str, rules: Sequence[ErrorRule] | None = None) -> list[str]:
    """The names of the known errors in it, the first cause first."""
    return [match.rule.name for match in findings_in(said, rules).matches]


def verdict_on(said: Job | str) -> Verdict:
    """Who failed first, as it says."""
    verdict = findings_in(said).verdict
    assert verdict, said
    return verdict


def rules_of(text: str) -> tuple[ErrorRule, ...]:
    """The rules that a file with this text has."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "rules.toml").write_text(text)
        return load_rules(Path(folder))
