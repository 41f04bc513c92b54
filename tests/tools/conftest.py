"""A machine for the doctor to examine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.tools.doctor import CheckResult, Machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """This machine, without what its variables tell; faults are planted in it."""
    return Machine(monkeypatch, tmp_path)


@pytest.fixture
def says(machine: Machine) -> Callable[..., CheckResult]:
    """Looks at the machine, whose MPI is MPICH, as `Machine.look` does, and compares."""
    machine.mpi()

    def judge(
        check: str, status: str, said: str = "", fix: str = "", **given: object
    ) -> CheckResult:
        found = machine.look(check, **given)
        assert (found.status, said in found.message) == (status, True), found
        assert (found.hint is None) == (status in ("ok", "skipped")), found
        assert fix in (found.hint or ""), found
        return found

    return judge
