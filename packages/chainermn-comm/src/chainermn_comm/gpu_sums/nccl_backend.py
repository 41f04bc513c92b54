"""Arrays on GPUs by NCCL among all ranks, on the current stream; also means of gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..gpu import NcclCommunicator, devices, nccl
from ..layout import Operand
from ..messaging import Algorithm, Backend, Parts, ProcessGroup, messages
from ..topology import Topology
from ..work import in_background
from .nccl_groups import NcclGroups, check_devices, connect_groups, connecting
from .nccl_sum import NcclSum
from .staged_sum import check_device, sum_through_host
from .watcher import Watcher

OPERATION = "moving arrays between GPUs"


class NcclBackend(Backend):
    """NCCL among the devices that are current at the first use. Sums are in NCCL's own order."""

    def __init__(
        self,
        group: ProcessGroup,
        nodes: Topology,
        leaders: int = 1,
        staged: bool = False,
    ) -> None:
        """Make a backend without connections (not collective): users choose devices later.

        Args:
            group: the ranks.
            nodes: the topology; gradients are summed in each node first.
            leaders: the number of ranks of each node that exchange with other nodes.
            staged: whether all data between nodes go through host memory.
        """
        super().__init__(group, self._make_sum)
        self._nodes = nodes
        self._leaders = leaders
        self._staged = staged and nodes.inter_size > 1
        self._all_ranks: NcclCommunicator | None = None
        self._watcher: Watcher | None = None  # None until something is connected

    # Gradients.

    def _make_sum(self, group: ProcessGroup) -> Algorithm:
        nodes = self._nodes
        # NCCL would connect no ranks.
        if self._staged and nodes.inter_size == group.size:
            return sum_through_host(group)
        if nodes.inter_size > 1:
            check_devices(group)
            groups = connect_groups(group, nodes, self._leaders, self._staged)
            self._watch().own(groups.within, groups.across)
        else:
            if group.size > 1:
                self.connect()
            groups = NcclGroups(across=self._all_ranks)
        return NcclSum(group, groups, self._watch())

    def _watch(self) -> Watcher:
        if self._watcher is None:
            self._watcher = Watcher(self.group)
        return self._watcher

    # Users' arrays.

    def can_stay_on_gpu(self, arrays: Sequence[Any], op: Any = None) -> bool:
        """Return whether these arrays, or none, can be moved, or summed by ``op``, now.

        ValueError is raised if an array is on another device than arrays of earlier
        calls.
        """
        if self._staged or _is_busy():
            return False
        if not arrays:
            return True
        if self.group.size == 1 and nccl.unavailable_reason() is not None:
            return False
        device = devices.current_device()
        if self._watcher is not None:
            device = self._watcher.device
        for array in arrays:
            check_device(array, device)
        return op is None or all([nccl.sums(array.dtype, op) for array in arrays])

    def connect(self) -> bool:
        if self._all_ranks is None:
            check_devices(self.group)
            with connecting(self.group):
                self._all_ranks = NcclCommunicator(self.group.comm)
            self._watch().own(self._all_ranks)
        return True

    def allocate(self, header: bytes) -> messages.Message:
        return messages.allocate(header, devices.empty)

    def exchange(self, outgoing: Parts, incoming: Parts) -> None:
        own = self.group.rank
        sent = [part for part in outgoing if part[0] != own]
        received = [part for part in incoming if part[0] != own]
        with self._enqueuing((sent, received)) as comm:
            comm.exchange(sent, received)

    def allgather(self, outgoing: Parts, incoming: Parts) -> None:
        self.broadcast(incoming)

    def broadcast(self, parts: Parts) -> None:
        parts = list(parts)
        with self._enqueuing(parts) as comm:
            comm.broadcast(parts)

    def allreduce(self, operand: Operand) -> None:
        with self._enqueuing(operand) as comm:
            comm.allreduce(operand.sources, operand.targets, operand.op)
            if operand.divisor != 1:
                for target in operand.targets:
                    target /= operand.divisor

    def reduce_scatter(self, sources: Sequence[Any], target: Any, op: Any) -> None:
        with self._enqueuing((sources, target)) as comm:
            comm.reduce(sources, target, op)

    @contextmanager
    def _enqueuing(self, used: Any) -> Iterator[NcclCommunicator]:
        assert self._all_ranks is not None  # ranks have connected
        with self._watch().enqueuing(OPERATION, used):
            yield self._all_ranks

    # The end.

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        super().close()

    def release_local(self) -> None:
        if self._watcher is not None:
            self._watcher.abandon()
        super().release_local()


def _is_busy() -> bool:
    """Return whether NCCL may work, or be given work, for another thread of this rank.

    Work of two NCCL communicators that comes in different orders on two ranks can wait
    for each other for ever. So only the main thread gives users' arrays to NCCL, and
    not while means are taken in the background. If one rank is busy, all ranks copy to
    host memory.
    """
    is_main = threading.current_thread() is threading.main_thread()
    return bool(in_background) or not is_main
