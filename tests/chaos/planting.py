"""What goes wrong on a rank, and when: the side of the chaos suite that runs inside of the job."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Left free when memory runs out: less than anybody's next array.
BLOCK_BYTES = 1 << 20
MEMORY_BYTES = 64 << 20  # until then
LINK_SECONDS = 20.0  # for the runner to cut the link
# The rank does something else than the others do, instead of failing by itself.
DEVIATIONS = ("skip", "other", "shape")


def raise_exception() -> None:
    raise RuntimeError("planted")


def run_out_of_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.getrlimit(resource.RLIMIT_AS)[1]))
    held = []  # the traceback will hold it, so that all that follows has no memory either
    while True:
        held.append(bytearray(BLOCK_BYTES))


def crash() -> None:
    ctypes.string_at(0)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop_in_python() -> None:
    while True:
        pass


def hold_in_c() -> None:
    while True:  # a signal ends the call, which holds the GIL
        ctypes.PyDLL(None).sleep(1000)


class Plan:
    """One fault on one rank, once."""

    def __init__(self, fault: dict[str, Any] | None, rank: int, notes: Path, disk: Path) -> None:
        """Plan it, unless it is another rank's, or happened before the job was started again.

        Args:
            fault: its ``kind``, ``moment``, ``rank`` and ``iteration``, and where it has no moment
                ``after``, the seconds until then.
            rank: this rank.
            notes: folder where the runner is told of it.
            disk: folder that is to run full.
        """
        self.notes, self.disk = notes, disk
        mine = fault is not None and fault["rank"] == rank and not (notes / "fault").exists()
        self.fault = fault if mine else None

    def start(self) -> None:
        """From now on it can happen at its time, whatever goes on then."""
        if self.fault is not None and self.fault["moment"] is None:
            kind = self.fault["kind"]
            signal.signal(signal.SIGALRM, lambda *_: self._strike(kind))
            # 0 would mean never.
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, self.fault["after"]))

    def stop(self) -> None:
        """It was too late: Python is about to give signals back their own meaning."""
        signal.setitimer(signal.ITIMER_REAL, 0)

    def at(self, moment: str, iteration: int = 0) -> str:
        """If this is its moment, have it happen; which deviation is due, or nothing."""
        fault = self.fault
        if fault is None or (fault["moment"], fault["iteration"]) != (moment, iteration):
            return ""
        self.fault = None
        self._strike(fault["kind"])
        return fault["kind"] if fault["kind"] in DEVIATIONS else ""

    def collective(
        self, moment: str, iteration: int, comm: Any, call: Callable[[], T], changed: Any = None
    ) -> T | None:
        """A collective call, which the fault may prevent or change."""
        how = self.at(moment, iteration)
        if how == "skip":
            return None
        if how == "other":
            comm.alltoall_obj([None] * comm.size)
        return changed() if how == "shape" else call()

    def _strike(self, kind: str) -> None:
        note(self.notes / "fault", f"{time.time()}")
        if kind in DEVIATIONS:
            return
        if kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[kind])
        elif kind == "disk":
            self._fill()
        elif kind == "link":
            self._await_cut()
        else:
            FAULTS[kind]()

    def _fill(self) -> None:
        with open(self.disk / "filler", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                return

    def _await_cut(self) -> None:
        deadline = time.monotonic() + LINK_SECONDS
        while not (self.notes / "cut").exists():
            if time.monotonic() > deadline:
                raise TimeoutError("nobody has cut the link")
            time.sleep(0.01)


SIGNALS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
FAULTS: dict[str, Callable[[], object]] = {
    "exception": raise_exception,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "SIGSEGV": crash,
    "SIGSTOP": stop,
    "memory": run_out_of_memory,
    "loop": loop_in_python,
    "held": hold_in_c,
}


def note(path: Path, text: str) -> None:
    """Write a small file that others see whole or not at all."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    os.replace(new, path)
