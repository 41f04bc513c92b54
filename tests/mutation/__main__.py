"""Plants faults one by one, and sees whether the tests that execute their line find them.

    make mutation-map                                   # once: which test executes what
    make mutation PACKAGE=comm NUMBER=30 SEED=4

Each fault is one of cosmic-ray's: a changed operator, number or condition, on a line that
some test of the first two tiers executes. Only these tests run, the quickest first, until
one fails. Appends a line of JSON for each fault to `--output` as soon as it is judged, and
goes on after those that are there: a run may be ended and started again. The work tree's
packages must be committed, and are so again afterwards.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from tests.mutation.chosen import CHOSEN
from tests.mutation.executions import Executions, node_of, ranks_of
from tests.mutation.faults import PACKAGES, ROOT, Fault, draw

# The quickest tests run first, as many as take this long when nothing is wrong.
FIRST_SECONDS = 20.0
# A command that takes this long, and so many times what its tests take, hangs.
START_SECONDS = 120.0
SLOWER = 4.0
# Ends a test that hangs, and a job.
TEST_SECONDS = "60"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.M)
NO_TESTS = 5  # pytest's status
# Marks the processes of a fault, so that none is left when it is judged.
MARK = "MUTATION_RUN"
HANG = "a hang"


def parts(fault: Fault, seconds: dict[str, float]) -> Iterator[list[str]]:
    """The executions of each command: quick ones first, then the rest; by number of ranks."""
    by_kind: dict[tuple[bool, int], list[str]] = {}
    for execution in sorted(fault.tests, key=lambda name: (seconds[name], name)):
        kind = is_alone(execution), ranks_of(execution)
        by_kind.setdefault(kind, []).append(execution)
    rest = []
    for _, executions in sorted(by_kind.items()):
        totals = itertools.accumulate(seconds[name] for name in executions)
        count = max(1, sum(total <= FIRST_SECONDS for total in totals))
        yield executions[:count]
        rest.append(executions[count:])
    yield from filter(None, rest)


def is_alone(execution: str) -> bool:
    """Whether it holds a promise of time, so that nothing may run beside it."""
    return node_of(execution).startswith("tests/test_promises_of_time.py")


def command(executions: list[str]) -> list[str]:
    """What runs these, all of one kind, until one fails."""
    ranks = ranks_of(executions[0])
    files = dict.fromkeys(node_of(name).partition("::")[0] for name in executions)
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    pytest += ["--full", "-p", "tests.mutation.chosen", *files]
    if ranks:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        return [str(mpiexec), "-n", str(ranks), *pytest, "--world"]
    if is_alone(executions[0]):
        return pytest
    return [*pytest, "-n", "3", "--dist", "loadgroup"]


def failing(executions: list[str], seconds: float) -> str:
    """The test that fails, or what else goes wrong; "" if nothing does."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as chosen:
        chosen.write("\n".join(map(node_of, executions)))
        chosen.flush()
        environment = {
            CHOSEN: chosen.name,
            MARK: mark,
            "CHAINERMN_TEST_SECONDS": TEST_SECONDS,
        }
        if ranks_of(executions[0]):
            environment["CHAINERMN_FORCE_ABORT_ON_EXCEPTION"] = "0"
            environment["OMP_NUM_THREADS"] = "1"
        process = subprocess.Popen(
            command(executions),
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=START_SECONDS + SLOWER * seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return HANG
        finally:
            _end(mark)
    if process.returncode in (0, NO_TESTS):
        return ""
    found = FAILED.search(output)
    return found[1] if found else f"status {process.returncode}: {output[-300:]}"


def _end(mark: str) -> None:
    """End all processes that still carry the mark: a fault may have left some."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except psutil.Error:
            pass  # it is gone, or somebody else's


def judge(fault: Fault, seconds: dict[str, float]) -> str:
    """What finds the fault; "" if nothing does."""
    try:
        fault.path.write_text(fault.changed)
        for executions in parts(fault, seconds):
            found = failing(executions, sum(seconds[name] for name in executions))
            if found:
                return found
    finally:
        fault.path.write_text(fault.code)
    return ""


def rows(
    package: str, seed: int, number: int, executions: Executions, done: set[str]
) -> Iterator[dict[str, object]]:
    """A row for each fault that isn't done."""
    for fault in itertools.islice(draw(package, seed, executions), number):
        place = f"{fault.path.relative_to(ROOT)}:{fault.line}"
        name = f"{place} {fault.was} -> {fault.now}"
        if name in done:
            continue
        start = time.monotonic()
        found = judge(fault, executions.seconds)
        yield {
            "package": package,
            "place": place,
            "was": fault.was,
            "now": fault.now,
            "found_by": found,
            "tests": len(fault.tests),
            "seconds": round(time.monotonic() - start, 1),
        }


def name_of(row: dict[str, object]) -> str:
    return f"{row['place']} {row['was']} -> {row['now']}"


def read(file: Path) -> list[dict[str, object]]:
    """The rows that a run has written so far."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def summarize(found: Iterable[dict[str, object]]) -> None:
    """Print what was missed, and how much was found of each package."""
    by_package: dict[object, list[dict[str, object]]] = {}
    for row in found:
        by_package.setdefault(row["package"], []).append(row)
    for package, its in by_package.items():
        missed = [row for row in its if not row["found_by"]]
        for row in missed:
            print(f"missed {row['place']}: {row['was']}  ->  {row['now']}")
        minutes = sum(float(str(row["seconds"])) for row in its) / 60
        print(
            f"{package}: found {len(its) - len(missed)} of {len(its)} in {minutes:.0f} min"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--package", choices=PACKAGES, required=True)
    parser.add_argument("--number", type=int, default=30)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("--map", type=Path, default=ROOT / ".mutation")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "packages"], cwd=ROOT):
        parser.error("packages/ has changes that aren't committed")
    if not (options.map / "data").exists():
        parser.error(f"{options.map} has no record of executions: make mutation-map")
    executions = Executions(options.map)
    done = {name_of(row) for row in read(options.output)}
    for row in rows(options.package, options.seed, options.number, executions, done):
        with options.output.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"{row['found_by'] or 'MISSED'}  {row['place']}  {row['seconds']} s",
            flush=True,
        )
    summarize(read(options.output))


if __name__ == "__main__":
    main()
