"""Plants faults one by one where they matter most, and sees whether the default tier finds them.

    make mutation SEED=14

Each fault is one of cosmic-ray's: a changed operator, number or condition. PER_AREA are
drawn for each of AREAS, and the tests that run first are those most likely to find one.
All run once before without a fault: where one fails then, nothing could be said. Prints
a row for each fault as soon as its tests have run. The work tree must be clean, and is
so again afterwards.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import get_ast  # type: ignore[import-not-found]
from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]
from cosmic_ray.plugins import get_operator, operator_names  # type: ignore[import-not-found]

ROOT = Path(__file__).resolve().parents[1]
COMM = "chainermn-comm/src/chainermn_comm"
TRAIN = "chainermn-train/src/chainermn_train"
# Where faults are planted, and the folder of tests that run first.
AREAS = {
    f"{COMM}/gradients/*.py": "tests/comm",
    f"{COMM}/allreduce/*.py": "tests/comm",
    f"{COMM}/arithmetic/*.py": "tests/comm",
    f"{COMM}/messaging/handshake.py": "tests/comm",
    f"{TRAIN}/optimizers/*.py": "tests/train",
    f"{TRAIN}/checkpoint/*.py": "tests/train",
}
PER_AREA = 12
# Ends a fault that hangs; a test that hangs ends itself long before.
SECONDS = 1800
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.M)


def without_annotations(code: str) -> str:
    """The code as a tree; annotations are never evaluated here."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def places(code: str) -> Iterator[tuple[Any, int]]:
    """Each place where an operator of cosmic-ray can change the code, as mutate_code takes it."""
    nodes = [get_ast(code)]
    for node in nodes:  # which grows
        nodes += getattr(node, "children", ())
    for operator in map(get_operator, operator_names()):
        if not operator.arguments():  # else it must be told what to replace
            count = sum(
                sum(1 for _ in operator().mutation_positions(node)) for node in nodes
            )
            yield from ((operator(), number) for number in range(count))


def draw(area: str, seed: int) -> Iterator[tuple[Path, str]]:
    """Files of the area in drawn order, each with a fault."""
    paths = sorted((ROOT / "packages").glob(area))
    drawn = [(path, *it) for path in paths for it in places(path.read_text())]
    random.Random(f"{seed} {area.removesuffix('/*.py')}").shuffle(drawn)
    for path, operator, number in drawn:
        code = path.read_text()
        with contextlib.suppress(AttributeError):  # of cosmic-ray, at `except a.b`
            fault = mutate_code(code, operator, number)
            if without_annotations(fault) != without_annotations(code):
                yield path, fault


def changed_line(before: str, after: str) -> tuple[int, str, str]:
    """The first line that differs: its number, what it was, and what it is."""
    lines = before.splitlines(), after.splitlines()
    for kind, first, end, start, stop in difflib.SequenceMatcher(
        None, *lines
    ).get_opcodes():
        if kind != "equal":
            was, now = " ".join(lines[0][first:end]), " ".join(lines[1][start:stop])
            return first + 1, was.strip(), now.strip()
    raise ValueError("nothing differs")


def tiers(folder: str) -> Iterator[list[str]]:
    """The default tier, a command at a time; the folder's tests first."""
    alone = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for paths in ([folder], []):
        for ranks in (2, 3, 1, 4):
            mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-n", str(ranks)]
            yield [*mpiexec, *alone, "--world", "-x", *paths]
        yield [
            *alone,
            "-x",
            "-n",
            "2",
            "--dist",
            "loadgroup",
            "-m",
            "not alone",
            *paths,
        ]
    yield [*alone, "-x", "-m", "alone"]


def found_by(folder: str) -> str:
    """The test that fails; what else ends a command badly; "" if none does."""
    variables = {"CHAINERMN_FORCE_ABORT_ON_EXCEPTION": "0", "OMP_NUM_THREADS": "1"}
    for command in tiers(folder):
        is_world = "--world" in command
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **(variables if is_world else {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return "a hang"
        if process.returncode not in (0, 5):  # 5: no test for so many ranks
            first = FAILED.search(output)
            return first[1] if first else f"status {process.returncode}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=__doc__
    )
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--areas", nargs="*", default=list(AREAS))
    options = parser.parse_args()
    if subprocess.check_output(["git", "status", "--porcelain", "packages"], cwd=ROOT):
        parser.error("packages/ has changes that aren't committed")
    for folder in sorted({AREAS[area] for area in options.areas}):
        if failing := found_by(folder):
            parser.error(f"without a fault {failing} fails already")
    for area in options.areas:
        for path, fault in itertools.islice(draw(area, options.seed), PER_AREA):
            code = path.read_text()
            line, was, now = changed_line(code, fault)
            try:
                path.write_text(fault)
                found = found_by(AREAS[area])
            finally:
                path.write_text(code)
            place = f"{path.relative_to(ROOT / 'packages')}:{line}"
            print(
                f"| {place} | `{was}` | `{now}` | {found or 'NOT FOUND'} |", flush=True
            )


if __name__ == "__main__":
    main()
