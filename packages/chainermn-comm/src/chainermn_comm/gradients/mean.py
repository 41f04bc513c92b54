"""Means of a model's gradients."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from .. import devices
from ..allreduce import AlgorithmCache, Operand
from ..config import Settings
from ..errors import now, raise_mismatch, share_failure, view_of
from ..mean_in_progress import MeanInProgress, in_background, require_all
from ..messaging import ProcessGroup
from .gradient_call import GradientCall, GradientSignature, call_of, joined, wire_dtypes_of

OPERATION, DESCRIPTION = "allreduce_grad", "a mean of gradients"
# What a rank sends to the others: the digest of its gradients' signature, and the length of the
# caller's payload, which follows. If gradients are missing, a bit for each follows that.
_HEAD = struct.Struct("<16sB")
_NO_GRADIENTS = bytes(16)
_NO_PLAN = "what is planned goes through another communicator: start_mean(through=...)"


class GradientMean(MeanInProgress):
    """A mean of gradients on MPI communicators.

    The first bucket is packed (on GPUs prepared) as it is handed in, if it has not been planned:
    ``agree`` then also serves as the barrier that an algorithm needs between packing and summing.
    """

    takes_plans = True
    _num_reduced = 0
    _finish_staged: Callable[[], None] | None = None
    # By call: which gradients some rank has; empty where no rank needs zeros.
    _present: Sequence[np.ndarray] = ()
    _handed_in: list[bool] = [False]  # noqa: RUF012  (replaced, never changed)

    def __init__(
        self,
        group: ProcessGroup,
        through: ProcessGroup,
        algorithms: AlgorithmCache,
        settings: Settings,
        zero_fill: bool = False,
        operation: str = OPERATION,
        planned_settings: Settings | None = None,
    ) -> None:
        """Agree on ``group``, and move data on ``through``, which the algorithms belong to.

        What is planned travels as ``planned_settings`` say: ranks have not compared others yet.
        """
        self._group, self._data_group, self._algorithms = group, through, algorithms
        self._settings, self._zero_fill = settings, zero_fill
        self._planned_settings = planned_settings or settings
        self._operation = operation
        self._calls: list[GradientCall] = []
        if through is not group:
            self._planned: SimpleQueue[GradientCall] = SimpleQueue()
            in_background.add(self)

    def add(self, model: Any, planned: bool = False) -> None:
        group, settings = self._group, self._settings
        in_memory = self._algorithms.stays_in_memory
        if planned and self._data_group is group:
            raise NotImplementedError(_NO_PLAN)
        try:
            call = call_of(model, group.rank, bool(self._zero_fill), settings, in_memory, planned)
            # What moves elsewhere needs a barrier there.
            if not (self._calls or planned) and self._data_group is group:
                self._stage(call)
        except BaseException as caught:
            error = devices.translate(caught, f"rank {group.rank}: {self._operation}")
            try:
                if not planned:  # else the caller is somewhere in backward, and reports it itself
                    with group.in_step(DESCRIPTION):
                        share_failure(group.handshake, self._operation, error)
                if error is not caught:
                    raise error from caught
                raise
            finally:
                group.handshake.leave()
                del error  # its traceback refers to this frame: a cycle would keep the gradients
        self._calls.append(call)
        if planned:
            try:
                if call.on_gpu:
                    with (
                        devices.translated_errors(f"rank {group.rank}: {self._operation}"),
                        devices.using_device_of(call.params[0].data),
                    ):
                        call.ready = devices.recorded_event()
            finally:  # all ranks wait for this bucket
                self._planned.put(call)

    def _stage(self, call: GradientCall) -> None:
        """Do what needs no other rank, where one algorithm, which exists, takes all gradients."""
        on_gpu = call.wire_dtypes is None
        algorithm = self._algorithms.made.get(on_gpu)
        sources, targets = call.arrays()
        if algorithm is None or (on_gpu and not all(map(devices.on_gpu, sources))):
            return
        wire_dtypes = call.wire_dtypes
        if wire_dtypes is None:
            dtypes = [source.dtype for source in sources]
            wire_dtypes = wire_dtypes_of(dtypes, self._settings, False, on_gpu)
        operand = Operand(sources, targets, wire_dtypes, self._data_group.size)
        self._finish_staged = algorithm.prepare(operand)

    def agree(self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b"") -> list[bytes]:
        group, handshake, calls = self._group, self._group.handshake, self._calls
        digest, nbytes, missing = _NO_GRADIENTS, 0, b""
        self._present = ()
        if calls:
            whole = self._signature()
            digest, nbytes = whole.digest, whole.nbytes
            if not all([call.complete for call in calls]):
                bits = [grad is None for call in calls for grad in call.grads]
                missing = np.packbits(bits).tobytes()
        own = _HEAD.pack(digest, len(payload)) + payload + missing
        since = now()
        try:
            rows = handshake(self._operation, signature, own, nbytes, typed=True)
            if rows.count(own) == len(rows):  # nearly always
                self._handed_in = [bool(calls)]
                payloads = [payload] * len(rows)
            else:
                payloads = self._compare(rows)
        except BaseException as error:
            handshake.leave()
            group.interrupt(DESCRIPTION, error, since)
            raise
        if self._data_group is not group or not all(self._handed_in):
            handshake.leave()
        return payloads

    def _signature(self) -> GradientSignature:
        """Return the signature of all gradients, which doesn't show how they were handed in."""
        if len(self._calls) == 1:
            return self._calls[0].signature
        return joined(tuple([call.signature for call in self._calls]))

    def _compare(self, rows: list[bytes]) -> list[bytes]:
        """Return the payloads; raise if gradients differ, and find out where zeros are needed."""
        digests = [row[: len(_NO_GRADIENTS)] for row in rows]
        self._handed_in = [digest != _NO_GRADIENTS for digest in digests]
        if self.complete and len(set(digests)) > 1:
            view = view_of(self._operation, self._signature())
            views = self._group.comm.allgather(view)
            raise_mismatch(self._operation, self._group.rank, views)
        ends = [_HEAD.size + _HEAD.unpack_from(row)[1] for row in rows]
        tails = [row[end:] for row, end in zip(rows, ends, strict=True)]
        if self.complete and any(tails) and len(set(tails)) > 1:
            counts = [len(call.grads) for call in self._calls]
            present = np.ones(sum(counts), bool)
            if all(tails):  # a rank that has all gradients sends none
                bits = [np.frombuffer(tail, np.uint8) for tail in tails]
                present = ~np.all(
                    [np.unpackbits(each, count=len(present)) for each in bits], axis=0
                )
            self._present = np.split(present, np.cumsum(counts)[:-1])
        return [row[_HEAD.size : end] for row, end in zip(rows, ends, strict=True)]

    def reduce_planned(self, number: int) -> None:
        if self._data_group is self._group:
            raise NotImplementedError(_NO_PLAN)
        handshake, algorithms = self._data_group.handshake, self._algorithms
        left, first = number, [self._planned.get()]
        on_gpu = first[0].on_gpu

        def next_operand(wait: bool) -> Operand | None:
            nonlocal left
            if not left:
                return None
            try:
                call = first.pop() if first else self._planned.get(wait)
            except Empty:
                return None
            left -= 1
            in_memory, size = algorithms.stays_in_memory, self._data_group.size
            return call.operand(self._planned_settings, in_memory, size)

        try:
            told = f"rank {self._group.rank}: {OPERATION}"
            with self._data_group.in_step(DESCRIPTION), devices.translated_errors(told):
                algorithm = algorithms.get(on_gpu)
                if not on_gpu:  # else each bucket is a call
                    handshake.begin(OPERATION)
                algorithm.stream(next_operand)
        finally:
            handshake.leave()

    def reduce(self) -> None:
        handshake, since = self._data_group.handshake, now()
        try:
            if len(self._handed_in) > 1:  # not all ranks were alike
                require_all(self._operation, self._group.rank, self._handed_in)
            while self._num_reduced < len(self._calls):
                index, call = self._num_reduced, self._calls[self._num_reduced]
                self._num_reduced += 1
                if self._data_group is not self._group:
                    handshake.begin(OPERATION, call.signature.nbytes)
                finish_staged, self._finish_staged = self._finish_staged, None
                if index < len(self._present):
                    self._add_zeros(call, self._present[index])
                elif finish_staged is not None:
                    finish_staged()
                    continue
                self._reduce(call)
        except BaseException as error:
            self._data_group.interrupt(DESCRIPTION, error, since)
            raise
        finally:
            handshake.leave()

    def _reduce(self, call: GradientCall) -> None:
        sources, targets = call.arrays()
        for on_gpu in (False, True):
            members = [i for i, grad in enumerate(sources) if devices.on_gpu(grad) == on_gpu]
            if not members:
                continue
            algorithm = self._algorithms.get(on_gpu)
            every = [sources[i] for i in members], [targets[i] for i in members]
            dtypes = [source.dtype for source in every[0]]
            in_memory = self._algorithms.stays_in_memory
            wire_dtypes = wire_dtypes_of(dtypes, self._settings, in_memory, on_gpu)
            algorithm.allreduce(Operand(*every, wire_dtypes, self._data_group.size))

    def _add_zeros(self, call: GradientCall, present: np.ndarray) -> None:
        """Give this rank zeros for the gradients that only others have (collective)."""
        zeros = self._data_group.run_on_all_ranks(OPERATION, lambda: _zeros(call, present), "zeros")
        for index, array in zeros.items():
            call.grads[index] = call.targets[index] = array

    def assign(self) -> None:
        if self._data_group is not self._group:
            self.leave_background()
        for index, call in enumerate(self._calls):
            if call.targets is call.grads and call.complete:
                continue
            present = self._present[index] if index < len(self._present) else None
            for number, (param, target) in enumerate(zip(call.params, call.targets, strict=True)):
                is_mean = call.grads[number] is not None or (
                    call.planned and present is not None and present[number]
                )
                if is_mean and param.grad is not target:
                    param.grad = target


def mean_gradients(group: ProcessGroup, mean: MeanInProgress, model: Any) -> None:
    """Replace each gradient of the model by its mean over ranks (collective)."""
    since = now()
    try:
        mean.add(model)
        mean.agree()
        mean.reduce()
    except BaseException as error:
        group.interrupt(DESCRIPTION, error, since)
        raise
    mean.assign()


def _zeros(call: GradientCall, present: np.ndarray) -> dict[int, Any]:
    """Return zeros, by index, for each gradient that is missing here and ``present`` somewhere."""
    return {
        index: devices.zeros_like(param.data)
        for index, (param, grad) in enumerate(zip(call.params, call.grads, strict=True))
        if grad is None and present[index] and param.data is not None
    }
