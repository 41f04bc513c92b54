"""Links whose parameters say by their attribute ``shardings`` which ranks hold them how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer

from chainermn_comm import Sharding


class ShardedLink(chainer.Link):
    """A link that hands out its parameters with their ``shardings``.

    Copies of a parameter lose the attribute, so the link sets it whenever it hands them
    out with their names. What links inside of this one say of a parameter stays.
    """

    def _sharding(self, param: Any) -> Sharding | None:
        """Return how ranks hold one of the parameters; None if the link doesn't know."""
        raise NotImplementedError

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Any]]:
        """Return an iterator over names and parameters, as every link does (not collective).

        Those without values come too if ``include_uninit``. It raises nothing.
        """
        for name, param in super().namedparams(include_uninit):
            sharding = self._sharding(param)
            known = getattr(param, "shardings", ())
            if sharding is not None and sharding not in known:
                param.shardings = (*known, sharding)
            yield name, param
