"""What `chainermn explain` knows of a job's output."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from chainermn_tools.explain import ErrorRule, load_rules, search
from tests.support.jobs import Job


def explained(said: Job | str, rules: Sequence[ErrorRule] | None = None) -> list[str]:
    """The names of the known errors in it, the first cause first."""
    text = said if isinstance(said, str) else said.out + said.err
    return [found.rule.name for found in search(io.BytesIO(text.encode()), rules)]


def rules_of(text: str) -> tuple[ErrorRule, ...]:
    """The rules that a file with this text has."""
    with TemporaryDirectory() as folder:
        (Path(folder) / "rules.toml").write_text(text)
        return load_rules(Path(folder))
