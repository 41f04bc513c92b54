"""Means of a model's gradients over the ranks of MPI communicators."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from hashlib import blake2b
from typing import Any

from ..errors import raise_together
from ..gpu import devices, staging
from ..messaging import ProcessGroup, digest_of
from ..reducer import Reducer
from ..signatures import checked_signature
from ..work import Earlier, Work, begun_before, wait_until_ended
from .bucket import Bucket, bucket_of

OPERATION = "allreduce_grad"
DESCRIPTION = "a mean of gradients"
MOST_BYTES = 64  # of a caller's payload
# What precedes that: the digest of the gradients' signature, and that of which are
# missing.
SIGNATURE_BYTES = 16
MISSING_BYTES = 8
HEAD_BYTES = SIGNATURE_BYTES + MISSING_BYTES
NO_GRADIENTS = bytes(SIGNATURE_BYTES)

# A loop has the same few signatures again and again.
_digest_of = lru_cache(maxsize=64)(digest_of)


class MpiReducer(Reducer):
    """A reducer on MPI communicators, whose groups it uses: on the channel's, data move."""

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
        self._settings = group.settings  # they may change while another thread works

    def _checked(self, bucket: Any) -> Bucket:
        group = self._communicator
        with (
            group.call(DESCRIPTION),
            # If nothing is raised, `agree` has the handshake.
            raise_together(group.handshake, self._operation, meet=False),
            devices.translated_errors(f"rank {self._rank}: {self._operation}"),
        ):
            own = self._bucket_of(bucket)
            there = own.arrays_on_gpu
            if there:  # raises where they aren't on the device of earlier calls
                self._channel.device.can_stay_on_gpu(there)
            return own

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
        return Work(take, own.assign, self._is_apart)

    def agree(
        self, signature: Iterable[tuple[Any, ...]] = (), payload: bytes = b""
    ) -> list[bytes]:
        group = self._communicator
        buckets = self._buckets
        entries = self._entries()
        missing = bytes([grad is None for bucket in buckets for grad in bucket.grads])
        with group.call(DESCRIPTION) as is_outermost:
            with raise_together(group.handshake, self._operation) as call:
                if not isinstance(payload, bytes) or len(payload) > MOST_BYTES:
                    raise ValueError(
                        f"rank {self._rank}: a payload is bytes, {MOST_BYTES} at most"
                    )
                head = NO_GRADIENTS
                if buckets:
                    head = _digest_of(tuple(entries))
                head += blake2b(missing, digest_size=MISSING_BYTES).digest()
                call.signature = checked_signature(self._operation, signature)
                call.payload = head + payload
                if not is_outermost:  # else a later call moves the gradients
                    call.nbytes = sum([bucket.nbytes for bucket in buckets])
            heads = [row[:HEAD_BYTES] for row in call.payloads]
            digests = [head[:SIGNATURE_BYTES] for head in heads]
            self._handed_in = [digest != NO_GRADIENTS for digest in digests]
            if self.complete and len(set(digests)) > 1:
                group.handshake.raise_mismatch(self._operation, entries)
            if self.complete and len(set(heads)) > 1:
                self._lacks_differ = True
                self._compare_missing(missing)
            return [row[HEAD_BYTES:] for row in call.payloads]

    def _entries(self) -> list[tuple[Any, ...]]:
        """Return what must be equal on all ranks that have handed in gradients."""
        settings = self._settings
        entries: list[tuple[Any, ...]] = [
            ("zero_fill", bool(self._zero_fill)),
            ("allreduce_grad_dtype", str(settings.allreduce_grad_dtype)),
            ("chunk_bytes", settings.chunk_bytes),
        ]
        for bucket in self._buckets:
            entries += bucket.entries
        return entries

    def _compare_missing(self, own: bytes) -> None:
        """Find out which gradients some rank has (collective): ranks lack different ones."""
        rows = self._communicator.handshake(self._operation, payload=own)
        present = iter([not all(column) for column in zip(*rows, strict=True)])
        for bucket in self._buckets:
            bucket.present = [next(present) for _ in bucket.grads]

    def _take(self, earlier: Earlier) -> None:
        group = self._channel
        with (
            group.call(DESCRIPTION) as is_outermost,
            devices.translated_errors(f"rank {self._rank}: {OPERATION}"),
        ):
            there = []
            if earlier or self._is_apart:
                there = [it for each in self._buckets for it in each.arrays_on_gpu]
            if there:
                # Work of two communicators of NCCL's that ranks enqueue in different
                # orders can wait for each other for ever.
                wait_until_ended(earlier)
            for bucket in self._buckets:
                if is_outermost:  # else it is a part of the call in which ranks agreed
                    group.handshake.begin(OPERATION, bucket.nbytes)
                if self._lacks_differ:
                    with group.together(f"{OPERATION}, zeros"):
                        bucket.add_zeros(bucket.present)
                bucket.take_means(self._settings, group)
            if there and self._is_apart:
                with devices.using_device_of(there[0]):
                    staging.wait([devices.recorded_event()])

    def _take_planned(self, bucket: Bucket, ready: Any, earlier: Earlier) -> None:
        group = self._channel
        with (
            group.call(DESCRIPTION),
            devices.translated_errors(f"rank {self._rank}: {OPERATION}"),
        ):
            group.handshake.begin(OPERATION, bucket.nbytes)
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
