"""Large arrays go from rank to rank where they are, without being packed; the others don't."""

from __future__ import annotations

from itertools import compress

import numpy as np

from .algorithm import Algorithm, Arrays, Bucket, Dtypes, NextBucket
from .bucketed import Bucketed
from .pairwise import PairwiseAllreduce
from .summation import overflow_errstate

# Arrays of this size and more, if they travel in their own dtype.
IN_PLACE_BYTES = 1 << 20


class LargeInPlace(Algorithm):
    """Takes the means of large arrays in place, and of all others by another algorithm."""

    def __init__(self, pairwise: PairwiseAllreduce, size: int, small: Algorithm) -> None:
        """Own the algorithm for small arrays; ``size`` is the number of ranks."""
        self._pairwise, self._size, self._small = pairwise, size, small
        self._large = Bucketed(pairwise.allreduce, size, per_tensor=True)

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        large = [
            target.nbytes >= IN_PLACE_BYTES and wire == target.dtype
            for target, wire in zip(targets, wire_dtypes, strict=True)
        ]
        for algorithm, which in ((self._large, True), (self._small, False)):
            chosen = [is_large == which for is_large in large]
            if any(chosen):
                algorithm.mean(
                    list(compress(sources, chosen)),
                    list(compress(targets, chosen)),
                    list(compress(wire_dtypes, chosen)),
                )

    def mean_each(self, next_bucket: NextBucket) -> None:
        """Buckets are one stream, in which there is always something under way."""
        held: list[Bucket] = []

        def next_buffer(wait: bool) -> np.ndarray | None:
            while (bucket := held.pop() if held else next_bucket(wait)) is not None:
                if bucket.flat is not None:
                    np.concatenate([each.reshape(-1) for each in bucket.sources], out=bucket.flat)
                    return bucket.flat
                if not wait:  # its messages must not mix with those under way
                    held.append(bucket)
                    return None
                self.mean(bucket.sources, bucket.targets, bucket.wire_dtypes)
            return None

        with overflow_errstate():
            self._pairwise.stream(next_buffer, self._size)

    def close(self) -> None:
        self._pairwise.close()
        self._small.close()
