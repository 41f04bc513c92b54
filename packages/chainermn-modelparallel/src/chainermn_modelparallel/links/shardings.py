"""The base class of links whose parameters say which ranks hold them, and in which way.

A parameter says so by its attribute ``shardings``, see :class:`chainermn_comm.Sharding`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import chainer

from chainermn_comm import Sharding


class ShardedLink(chainer.Link):
    """A link whose ``namedparams`` sets the attribute ``shardings`` of each parameter.

    Copies of a parameter lose the attribute, so every call of ``namedparams`` sets it
    anew. Shardings that inner links have set are kept.
    """

    def _sharding(self, param: Any) -> Sharding | None:
        """Return how ranks hold one of the link's parameters; None if the link doesn't say."""
        raise NotImplementedError

    def namedparams(self, include_uninit: bool = True) -> Iterator[tuple[str, Any]]:
        """Return an iterator over names and parameters, as every link does (not collective).

        If ``include_uninit`` is true, parameters without values come, too. The method
        raises no errors.
        """
        for name, param in super().namedparams(include_uninit):
            sharding = self._sharding(param)
            known = getattr(param, "shardings", ())
            if sharding is not None and sharding not in known:
                param.shardings = (*known, sharding)
            yield name, param
