"""Large arrays go from rank to rank where they are, without being packed; the others don't."""

from __future__ import annotations

from itertools import compress

from .algorithm import Algorithm, Arrays, Dtypes

# Arrays of this size and more, if they travel in their own dtype.
IN_PLACE_BYTES = 1 << 20


class LargeInPlace(Algorithm):
    """Takes the means of large arrays by one algorithm, and of all others by another."""

    def __init__(self, large: Algorithm, small: Algorithm) -> None:
        """Own both."""
        self._large, self._small = large, small

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

    def close(self) -> None:
        self._large.close()
        self._small.close()
