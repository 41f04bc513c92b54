"""The hosts, and their ranks, that a scheduler gives to the job in which this process is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from chainermn_tools.jobs.hosts import MAX_RANKS, Host, parse_hostfile
from chainermn_tools.threads import expand_counts

# Of Slurm's list of nodes an entry; and of that a word, or what stands in brackets.
ENTRY = re.compile(r"(?:[^][,]|\[[\d,-]+\])+")
PART = re.compile(r"([^][,]+)|\[([\d,-]+)\]")


def find_allocation(env: Mapping[str, str]) -> tuple[str, tuple[Host, ...]] | None:
    """Return the scheduler, and its job's hosts in its order; None outside of a job.

    Raise ValueError if its variables, or a file that they name, can't be read.
    """
    for scheduler, variable, read in SCHEDULERS:
        if env.get(variable):
            where = f"{scheduler}'s {variable}"
            try:
                return scheduler, parse_hostfile(read(env, env[variable]), where)
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{where} can't be read: {error}; give --hosts"
                ) from None
    return None


def expand_nodes(text: str) -> list[str]:
    """Return the names in Slurm's ``n[01-02,7],m``; raise ValueError for what is no such list."""
    entries = ENTRY.findall(text)
    if ",".join(entries) != text:
        raise ValueError(f"{text!r} is no list of nodes")
    parts = (
        [[w] if w else [*_numbers(r)] for w, r in PART.findall(entry)]
        for entry in entries
    )
    names = itertools.chain.from_iterable(itertools.product(*each) for each in parts)
    return ["".join(name) for name in itertools.islice(names, MAX_RANKS)]


def _numbers(ranges: str) -> Iterator[str]:
    """Yield the numbers in ``01-03,7``, as wide as each range's first."""
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in itertools.islice(
            range(int(first), int(last or first) + 1), MAX_RANKS
        ):
            yield f"{number:0{len(first)}}"


def _slurm(env: Mapping[str, str], nodes: str) -> str:
    names = expand_nodes(nodes)
    # Then srun starts one a node, and the other tasks are cores.
    if "SLURM_NTASKS" not in env:
        return "\n".join(names)
    counts = expand_counts(env.get("SLURM_TASKS_PER_NODE", ""))
    if len(counts) != len(names):
        raise ValueError(
            f"SLURM_TASKS_PER_NODE counts {len(counts)} nodes, it names {len(names)}"
        )
    return "\n".join(
        f"{name}:{count}" for name, count in zip(names, counts, strict=True)
    )


def _file(_: Mapping[str, str], path: str) -> str:
    return Path(path).read_text()


# The variable that says what a job has, and what makes a hostfile's text of it.
SCHEDULERS: tuple[tuple[str, str, Callable[[Mapping[str, str], str], str]], ...] = (
    ("Slurm", "SLURM_JOB_NODELIST", _slurm),
    ("PBS", "PBS_NODEFILE", _file),
    ("LSF", "LSB_DJOB_RANKFILE", _file),
    (
        "LSF",
        "LSB_MCPU_HOSTS",
        lambda _, text: re.sub(r"(\S+) +(\S+) *", r"\1:\2\n", text),
    ),
    (
        "SGE",
        "PE_HOSTFILE",
        lambda _, path: re.sub(r"(?m)[ \t]+(\S+).*", r":\1", _file(_, path)),
    ),
)
