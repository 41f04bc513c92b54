"""Means of a model's gradients over the ranks of MPI communicators."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from hashlib import blake2b
from typing import Any

from ..errors import share_failure
from ..gpu import devices, staging
from ..messaging import ProcessGroup
from ..reducer import Reducer
from ..work import Earlier, Work, begun_before, wait_until_ended
from .bucket import Bucket, bucket_of, common_entries

OPERATION = "allreduce_grad"
DESCRIPTION = "a mean of gradients"
# Bytes before a caller's payload: a digest of the gradients' descriptions, a digest of
# the missing gradients, and whether the rank has begun with the means.
DIGEST_BYTES = 16
MISSING_BYTES = 8
HEAD_BYTES = DIGEST_BYTES + MISSING_BYTES + 1
NO_GRADIENTS = bytes(HEAD_BYTES)
BEGUN = (b"\0", b"\1")  # that the rank hasn't begun, or has


class MpiReducer(Reducer):
    """A reducer on MPI communicators, which moves data in the channel's process group."""

    takes_plans = True
    _lacks_differ = False  # whether a gradient is missing on some ranks only

    def __init__(
        self,
        group: ProcessGroup,
        zero_fill: bool = False,
        operation: str = OPERATION,
        channel: ProcessGroup | None = None,
    ) -> None:
        super().__init__(group, zero_fill, operation, channel)
        # The settings may change while another thread works.
        self._settings = group.settings

    def _checked(self, bucket: Any) -> Bucket:
        group = self._communicator
        try:
            with devices.translated_errors(f"rank {self._rank}: {self._operation}"):
                own = self._bucket_of(bucket)
                there = own.arrays_on_gpu
                if there:  # raises unless they are on the device of earlier calls
                    self._channel.device.can_stay_on_gpu(there)
        except BaseException as error:
            with group.call(DESCRIPTION):
                share_failure(group.handshake, self._operation, error)
            raise
        return own  # `agree` has the handshake

    def _bucket_of(self, model: Any, planned: bool = False) -> Bucket:
        zero_fill = bool(self._zero_fill)
        return bucket_of(model, self._rank, zero_fill, self._settings, planned)

    def add_planned(self, bucket: Any) -> Work:
        ready = None  # the event after which gradients on a GPU are there
        with devices.translated_errors(f"rank {self._rank}: {self._operation}"):
            own = self._bucket_of(bucket, planned=True)
            there = own.arrays_on_gpu
            if there:
                with devices.using_device_of(there[0]):
                    ready = devices.recorded_event()
        self._buckets.append(own)
        take = partial(self._take_planned, own, ready, begun_before())
        return Work(take, own.assign, self._on_channel)

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        group = self._communicator
        with group.call(DESCRIPTION) as is_outermost:
            self._begin()
            own = payload
            # The handshake refuses anything else, on all ranks.
            if isinstance(payload, bytes):
                own = self._head() + payload
            nbytes = 0
            if not is_outermost:  # otherwise a later call moves the gradients
                nbytes = sum([bucket.description.nbytes for bucket in self._buckets])
            rows = group.handshake(self._operation, signature, own, nbytes)
            if rows.count(own) == len(rows):  # nearly always
                self._added_by_rank = [len(self._buckets) > 0]
                return [payload] * len(rows)
            self._compare(rows)
            return [row[HEAD_BYTES:] for row in rows]

    def _begin(self) -> None:
        """Begin with the first bucket's means, unless another thread takes them on a channel."""
        if self._on_channel or not self._buckets:
            return
        group = self._communicator
        try:
            self._buckets[0].begin_means(self._settings, group)
        except BaseException as error:
            share_failure(group.handshake, self._operation, error)
            raise

    def _head(self) -> bytes:
        """Return the bytes that describe this rank's gradients to other ranks."""
        if not self._buckets:
            return NO_GRADIENTS
        of_all = [bucket.description for bucket in self._buckets]
        digest = _joined([each.digest for each in of_all])
        missing = _joined([each.missing for each in of_all])
        has_begun = BEGUN[self._buckets[0].finish is not None]
        return digest + missing[:MISSING_BYTES] + has_begun

    def _compare(self, rows: list[bytes]) -> None:
        """Raise if gradients differ; if some are missing on some ranks only, find out which."""
        heads = {row[:HEAD_BYTES] for row in rows}
        self._added_by_rank = [not row.startswith(NO_GRADIENTS) for row in rows]
        if not self.complete or len(heads) == 1:
            return
        handshake = self._communicator.handshake
        if len({head[:DIGEST_BYTES] for head in heads}) > 1:
            entries = common_entries(bool(self._zero_fill), self._settings)
            for bucket in self._buckets:
                entries += bucket.description.entries
            handshake.raise_mismatch(self._operation, entries)
        self._lacks_differ = True
        for bucket in self._buckets:
            bucket.finish = None
            by_rank = handshake(self._operation, payload=bytes(bucket.present))
            bucket.present = [any(column) for column in zip(*by_rank, strict=True)]

    def _take(self, earlier: Earlier) -> None:
        group = self._channel
        with (
            group.call(DESCRIPTION) as is_outermost,
            devices.translated_errors(f"rank {self._rank}: {OPERATION}"),
        ):
            there = []
            if earlier or self._on_channel:
                there = [it for each in self._buckets for it in each.arrays_on_gpu]
            if there:
                # If ranks enqueue the work of two NCCL communicators in different orders,
                # the two may wait for each other for ever.
                wait_until_ended(earlier)
            for bucket in self._buckets:
                # Otherwise this is a part of the call in which ranks agreed.
                if is_outermost:
                    group.handshake.begin(OPERATION, bucket.description.nbytes)
                if self._lacks_differ:
                    with group.together(f"{OPERATION}, zeros"):
                        bucket.add_zeros(bucket.present)
                bucket.take_means(self._settings, group)
            if there and self._on_channel:
                with devices.using_device_of(there[0]):
                    staging.wait([devices.recorded_event()])

    def _take_planned(self, bucket: Bucket, ready: Any, earlier: Earlier) -> None:
        group = self._channel
        with (
            group.call(DESCRIPTION),
            devices.translated_errors(f"rank {self._rank}: {OPERATION}"),
        ):
            group.handshake.begin(OPERATION, bucket.description.nbytes)
            if ready is not None:
                wait_until_ended(earlier)
                devices.current_stream().wait_event(ready)
            bucket.targets = [devices.empty_like(each.data) for each in bucket.params]
            bucket.add_zeros([True] * len(bucket.params))
            bucket.take_means(self._settings, group)

    def _assign(self) -> None:
        for bucket in self._buckets:
            bucket.assign()


def mean_gradients(group: ProcessGroup, reducer: Reducer, model: Any) -> None:
    """Replace each gradient of the model by its mean over ranks (collective)."""
    with group.call(DESCRIPTION):
        reducer.add(model)
        reducer.agree()
        work = reducer.start()
        work.wait()
    work.assign()


def _joined(digests: list[bytes]) -> bytes:
    """Return a digest of all of them."""
    if len(digests) == 1:  # nearly always
        return digests[0]
    return blake2b(b"".join(digests), digest_size=DIGEST_BYTES).digest()
