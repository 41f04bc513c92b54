"""Means of a model's gradients over the ranks of MPI communicators."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from ..errors import raise_together
from ..gpu import devices, staging
from ..messaging import ProcessGroup, digest_of
from ..reducer import Reducer
from ..signatures import checked_signature
from .bucket import Bucket, bucket_of

OPERATION = "allreduce_grad"
DESCRIPTION = "a mean of gradients"
MOST_BYTES = 64  # of a caller's payload
# What a rank sends to the others: the digest of its gradients' signature, and the
# length of the caller's payload, which follows. If gradients are missing, a bit for
# each follows that.
_HEAD = struct.Struct("<16sB")
_NO_GRADIENTS = bytes(16)


class MpiReducer(Reducer):
    """A reducer on MPI communicators.

    The first bucket is prepared as it is handed in, if it has not been planned:
    ``agree`` then also serves as the barrier that an algorithm needs between packing
    and summing.
    """

    takes_plans = True
    _finish_first: Callable[[], None] | None = None  # once it is prepared
    # By bucket: which gradients some rank has; empty where no rank needs zeros.
    _present: Sequence[np.ndarray] = ()

    def __init__(
        self,
        group: ProcessGroup,
        channel: ProcessGroup,
        zero_fill: bool = False,
        operation: str = OPERATION,
    ) -> None:
        """Agree on ``group``; move data on ``channel``, by its backends."""
        self._group = group
        self._data_group = channel
        self._settings = group.settings  # they may change while another thread works
        self._zero_fill = zero_fill
        self._operation = operation
        self._rank = group.rank
        self._is_apart = channel is not group
        self._buckets: list[Bucket] = []
        if self._is_apart:
            self._planned: SimpleQueue[Bucket] = SimpleQueue()

    def add(self, bucket: Any, planned: bool = False) -> None:
        self._check_bucket(planned)
        if planned:
            self._add_planned(bucket)
            return
        group = self._group
        with (
            group.call(DESCRIPTION),
            # If nothing is raised, `agree` has the handshake.
            raise_together(group.handshake, self._operation, meet=False),
            devices.translated_errors(f"rank {self._rank}: {self._operation}"),
        ):
            own = self._bucket_of(bucket)
            # On another communicator, a barrier of that one would be needed.
            if not (self._buckets or self._is_apart):
                self._prepare(own)
        self._buckets.append(own)

    def _add_planned(self, bucket: Any) -> None:
        """Hand in a planned bucket; the caller is in backward, and reports errors itself."""
        with devices.translated_errors(f"rank {self._rank}: {self._operation}"):
            own = self._bucket_of(bucket, planned=True)
            self._buckets.append(own)
            try:
                if own.on_gpu:
                    with devices.using_device_of(own.params[0].data):
                        own.ready = devices.recorded_event()
            finally:  # all ranks wait for this bucket
                self._planned.put(own)

    def _bucket_of(self, model: Any, planned: bool = False) -> Bucket:
        is_local = self._data_group.host.is_local
        zero_fill = bool(self._zero_fill)
        return bucket_of(
            model, self._rank, zero_fill, self._settings, is_local, planned
        )

    def _check_plan(self) -> None:
        if not self._is_apart:
            raise NotImplementedError(
                "what is planned goes through another communicator: make_reducer(channel=...)"
            )

    def _prepare(self, bucket: Bucket) -> None:
        """Begin the sum if one algorithm, which is already made, takes all gradients."""
        operands = bucket.operands(self._settings, self._data_group)
        if len(operands) == 1:
            backend, operand = operands[0]
            if backend.made_gradient_sum is not None:
                self._finish_first = backend.made_gradient_sum.prepare(operand)

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        group = self._group
        buckets = self._buckets
        self._present = ()
        with group.call(DESCRIPTION) as is_outermost:
            with raise_together(group.handshake, self._operation) as meeting:
                if not isinstance(payload, bytes) or len(payload) > MOST_BYTES:
                    raise ValueError(
                        f"rank {self._rank}: a payload is bytes, {MOST_BYTES} at most"
                    )
                own = _HEAD.pack(self._digest(), len(payload)) + payload
                if not all([bucket.complete for bucket in buckets]):
                    bits = [grad is None for bucket in buckets for grad in bucket.grads]
                    own += np.packbits(bits).tobytes()
                if not is_outermost:  # else a later call moves the gradients
                    meeting.nbytes = sum([bucket.nbytes for bucket in buckets])
                meeting.signature = checked_signature(self._operation, signature)
                meeting.payload = own
            rows = meeting.payloads
            if rows.count(own) == len(rows):  # nearly always
                self._handed_in = [bool(buckets)]
                return [payload] * len(rows)
            return self._compare(rows)

    def _digest(self) -> bytes:
        """Return what is equal on ranks that have handed in the same gradients."""
        digests = [bucket.digest for bucket in self._buckets]
        if not digests:
            return _NO_GRADIENTS
        if len(digests) == 1:
            return digests[0]
        return digest_of(digests)

    def _compare(self, rows: list[bytes]) -> list[bytes]:
        """Return the payloads; raise if gradients differ, and find out where zeros are needed."""
        heads = [_HEAD.unpack_from(row) for row in rows]
        digests = {digest for digest, _ in heads}
        self._handed_in = [digest != _NO_GRADIENTS for digest, _ in heads]
        if self.complete and len(digests) > 1:
            first, *others = self._buckets
            entries = [*first.entries]  # settings, and parameters
            for bucket in others:
                entries += [it for it in bucket.entries if it[0] == "parameter"]
            self._group.handshake.raise_mismatch(self._operation, entries)
        payloads = []
        missing = []
        for row, (_, nbytes) in zip(rows, heads, strict=True):
            end = _HEAD.size + nbytes
            payloads.append(row[_HEAD.size : end])
            missing.append(row[end:])
        if self.complete and len(set(missing)) > 1:
            self._present = self._present_somewhere(missing)
        return payloads

    def _present_somewhere(self, missing: list[bytes]) -> list[np.ndarray]:
        """Return by bucket which gradients some rank has; ``missing`` has bits of each rank."""
        ends = np.cumsum([len(bucket.grads) for bucket in self._buckets])
        total = int(ends[-1])
        present = np.zeros(total, bool)
        for row in missing:
            if row:
                bits = np.unpackbits(np.frombuffer(row, np.uint8), count=total)
                present |= bits == 0
            else:  # a rank that has all gradients sends no bits
                present[:] = True
        return np.split(present, ends[:-1])

    def _take(self, planned: int) -> None:
        group = self._data_group
        with group.call(DESCRIPTION) as is_outermost:
            if planned:
                with devices.translated_errors(f"rank {self._rank}: {OPERATION}"):
                    self._take_planned(planned)
                return
            there = None
            if self._before or self._is_apart:
                there = self._parameter_on_gpu()
            if there is not None:
                self._wait_for_those_before()
            for number, bucket in enumerate(self._buckets):
                if is_outermost:  # else it is a part of the call in which ranks agreed
                    group.handshake.begin(OPERATION, bucket.nbytes)
                if number < len(self._present):
                    with group.together(f"{OPERATION}, zeros"):
                        bucket.add_zeros(self._present[number])
                elif number == 0 and self._finish_first is not None:
                    self._finish_first()
                    continue
                self._sum(bucket)
            if there is not None and self._is_apart:
                with devices.using_device_of(there):
                    staging.wait([devices.recorded_event()])

    def _sum(self, bucket: Bucket) -> None:
        for backend, operand in bucket.operands(self._settings, self._data_group):
            algorithm = backend.gradient_sum()
            algorithm.allreduce(operand)

    def _parameter_on_gpu(self) -> Any:
        """Return a parameter's array on a GPU, if there is one.

        Work of two communicators of NCCL's that ranks enqueue in different orders can
        wait for each other for ever. So each waits for what was started before it.
        """
        buckets = [bucket for bucket in self._buckets if not bucket.wire_dtypes]
        arrays = [param.data for bucket in buckets for param in bucket.params]
        return next(filter(devices.on_gpu, arrays), None)

    def _take_planned(self, count: int) -> None:
        """Take the means of that many buckets, one after the other as they come (collective)."""
        group = self._data_group
        for number in range(count):
            group.handshake.leave()  # it waits for this rank, which computes
            bucket = self._planned.get()
            group.handshake.begin(OPERATION, bucket.nbytes)
            if number == 0 and bucket.on_gpu:
                self._wait_for_those_before()
            bucket.begin_planned()
            self._sum(bucket)

    def _assign(self) -> None:
        if len(self._present):
            for bucket, present in zip(self._buckets, self._present, strict=True):
                bucket.assign(present)
        else:
            for bucket in self._buckets:
                bucket.assign(None)


def mean_gradients(group: ProcessGroup, reducer: Reducer, model: Any) -> None:
    """Replace each gradient of the model by its mean over ranks (collective)."""
    with group.call(DESCRIPTION):
        reducer.add(model)
        reducer.agree()
        work = reducer.start()
        work.wait()
    work.assign()
