"""Plants faults one by one, and sees whether the tests that execute their line find them.

    make mutation-map                    # once a commit: which test executes what
    make mutation PACKAGE=comm

Each fault is one of cosmic-ray's: a changed operator, number or condition, on a line that
some test of the first two tiers executes. Only these tests run, the quickest first, until
one fails; a test that takes more than a moment must pass without the fault, or it doesn't
count. A line of JSON for each fault is written as soon as it is judged, and a run goes on
after those that are there: it may be ended and started again. The tree must be the one
that was recorded, and is so again afterwards.
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from tests.mutation.executions import ROOT, Executions, file_of, node_of, ranks_of
from tests.mutation.faults import Fault, draw

# How many faults of each package are planted, unless another number is asked for.
NUMBERS = {"comm": 30, "train": 30, "modelparallel": 15, "tools": 15}
# The quickest tests run first, as many as take this long when nothing is wrong.
FIRST_SECONDS = 20.0
# A test hangs if it takes so many times as long as recorded, and at least so long; a
# command, with the time for its start.
SLOWER = 4.0
TEST_SECONDS = 30.0
START_SECONDS = 40.0
# Tests that are quicker than this start no job, and don't fail by chance.
MOMENT = 1.0
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", re.M)
# pytest's statuses: when all passed, and when it doesn't know a test.
PASSED = 0
UNKNOWN = 4
# Marks the processes of a fault, so that none is left when it is judged.
MARK = "MUTATION_RUN"
# As in the Makefile.
IN_WORLDS = {
    "CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "1",
    "OMP_NUM_THREADS": "1",
}


def is_alone(execution: str) -> bool:
    """Whether it holds a promise of time, so that nothing may run beside it."""
    return file_of(execution) == "tests/test_promises_of_time.py"


def parts(tests: set[str], seconds: dict[str, float]) -> Iterator[list[str]]:
    """The tests of each command: quick ones of each kind first, then the rest."""
    by_kind: dict[tuple[bool, int], list[str]] = {}
    for execution in sorted(tests, key=lambda name: (seconds[name], name)):
        kind = is_alone(execution), ranks_of(execution)
        by_kind.setdefault(kind, []).append(execution)
    rest = []
    for _, executions in sorted(by_kind.items()):
        totals = itertools.accumulate(seconds[name] for name in executions)
        count = max(1, sum(total <= FIRST_SECONDS for total in totals))
        yield executions[:count]
        rest.append(executions[count:])
    yield from filter(None, rest)


def command(executions: list[str], nodes: str) -> list[str]:
    """What runs these, all of one kind, until one fails; a file has their nodes."""
    ranks = ranks_of(executions[0])
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    pytest.append(f"@{nodes}")
    if ranks:
        mpiexec = Path(sys.executable).with_name("mpiexec")
        return [str(mpiexec), "-n", str(ranks), *pytest, "--world"]
    if is_alone(executions[0]) or len(executions) == 1:
        return pytest
    return [*pytest, "-n", "3", "--dist", "loadgroup"]


def failing(executions: list[str], seconds: dict[str, float]) -> str:
    """The test that fails, or what else goes wrong; "" if nothing does."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    longest = max(seconds[name] for name in executions)
    limit = START_SECONDS + SLOWER * sum(seconds[name] for name in executions)
    environment = {
        **os.environ,
        MARK: mark,
        "CHAINERMN_TEST_SECONDS": str(max(TEST_SECONDS, SLOWER * longest)),
    }
    if ranks_of(executions[0]):
        environment |= IN_WORLDS
    # Files, since a process that is left over would hold a pipe open.
    with tempfile.NamedTemporaryFile("w+") as chosen, tempfile.TemporaryFile() as out:
        chosen.write("\n".join(map(node_of, executions)))
        chosen.flush()
        process = subprocess.Popen(
            command(executions, chosen.name),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return "a hang"
        finally:
            _end(process, mark)
        out.seek(0)
        output = out.read().decode(errors="replace")
    if status == PASSED:
        return ""
    if status == UNKNOWN:
        sys.exit(f"the record has tests that aren't there: make mutation-map\n{output}")
    found = FAILED.search(output)
    if found:
        return found[1]
    return f"status {status}"


def _end(process: subprocess.Popen[bytes], mark: str):
    """End a command, and all processes that carry its mark: a fault may have left some."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for each in psutil.process_iter():
        try:
            if each.environ().get(MARK) == mark:
                each.kill()
        except psutil.Error:
            pass  # it is gone, or somebody else's


def judge(fault: Fault, seconds: dict[str, float]) -> str:
    """What finds the fault; "" if nothing does."""
    tests = set(fault.tests)
    for executions in parts(tests, seconds):
        left = executions
        while left:
            try:
                fault.path.write_text(fault.changed)
                found = failing(left, seconds)
            finally:
                fault.path.write_text(fault.code)
            if not found:
                break
            name = f"{ranks_of(left[0])}:{found.partition('@')[0]}"
            if name not in left or seconds[name] < MOMENT:
                return found
            if not failing([name], seconds):  # without the fault
                return found
            left = [each for each in left if each != name]
    return ""


def read(file: Path) -> list[dict[str, Any]]:
    """The rows that a run has written so far."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def git(*words: str) -> str:
    return subprocess.check_output(["git", *words], cwd=ROOT, text=True).strip()


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--package", choices=NUMBERS, required=True)
    parser.add_argument("--number", type=int, help="of faults (30; 15 of the smaller)")
    parser.add_argument("--seed", type=int, default=4)
    options = parser.parse_args()
    folder = ROOT / ".mutation"
    if not (folder / "data").exists():
        parser.error("there is no record of executions: make mutation-map")
    executions = Executions(folder)
    trees = "packages", "src", "tests", ":!tests/mutation"
    if git("diff", executions.commit, "--", *trees):
        parser.error("the record of executions is another tree's: make mutation-map")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))

    results = ROOT / "result" / "mutation"
    results.mkdir(parents=True, exist_ok=True)
    name = f"{options.package}-{options.seed}-{executions.commit[:8]}.jsonl"
    file = results / name
    number = options.number or NUMBERS[options.package]
    drawn = draw(options.package, options.seed, executions)
    for fault in itertools.islice(drawn, len(read(file)), number):
        start = time.monotonic()
        row = {
            "package": options.package,
            "place": f"{fault.path.relative_to(ROOT)}:{fault.line}",
            "was": fault.was,
            "now": fault.now,
            # The test that failed, or what else went wrong; "" if it was missed.
            "found_by": judge(fault, executions.seconds),
            "tests": len(fault.tests),  # that execute the line
        }
        row["seconds"] = round(time.monotonic() - start, 1)
        line = json.dumps(row)
        with file.open("a") as lines:
            lines.write(f"{line}\n")
        print(line, flush=True)
    rows = read(file)
    missed = [row["place"] for row in rows if not row["found_by"]]
    print(f"missed {len(missed)} of {len(rows)}:", *missed, sep="\n")


if __name__ == "__main__":
    main()
