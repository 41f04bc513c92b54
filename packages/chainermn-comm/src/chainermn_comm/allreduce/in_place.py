"""Large arrays go from rank to rank where they are, without being packed; the others don't."""

from __future__ import annotations

import numpy as np

from .algorithm import Algorithm, Arrays, Bucket, Dtypes, NextBucket, mean_apart
from .bucketed import Bucketed
from .halving import HalvingAllreduce
from .pairwise import PairwiseAllreduce
from .summation import overflow_errstate

# Arrays of this size and more, if they travel in their own dtype.
IN_PLACE_BYTES = 1 << 20


class LargeInPlace(Algorithm):
    """Takes the means of large arrays in place, and of all others by another algorithm."""

    def __init__(
        self, through_mpi: PairwiseAllreduce | HalvingAllreduce, size: int, small: Algorithm
    ) -> None:
        """Own the algorithm for small arrays; ``size`` is the number of ranks."""
        self._through_mpi, self._size, self._small = through_mpi, size, small
        self._large = Bucketed(through_mpi.allreduce, size, per_tensor=True)

    def mean(self, sources: Arrays, targets: Arrays, wire_dtypes: Dtypes) -> None:
        large = [
            target.nbytes >= IN_PLACE_BYTES and wire == target.dtype
            for target, wire in zip(targets, wire_dtypes, strict=True)
        ]
        mean_apart(self._large, large, self._small, sources, targets, wire_dtypes)

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
            self._through_mpi.stream(next_buffer, self._size)

    def close(self) -> None:
        self._through_mpi.close()
        self._small.close()
