"""Says at once when the graph of a `send` or `recv` is dropped before backward came to it.

Nothing else would: half of a model would not be trained, or the other rank would wait in vain.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

# How the sends were called that were dropped though a gradient may come for them, by number.
_dropped: dict[int, str] = {}


def watch_send(node: Any, number: int, here: int, peer: int, tag: int) -> weakref.finalize:
    """Warn if the node is dropped before the result's ``detach`` was called."""
    return _watched(node, _send_was_dropped, number, here, peer, tag)


def watch_recv(node: Any, here: int, peer: int, tag: int) -> weakref.finalize:
    """Likewise."""
    return _watched(node, _recv_was_dropped, here, peer, tag)


def call_of_dropped(number: int | None) -> str | None:
    """How the send was called that was dropped and had this number; None if there is none."""
    return None if number is None else _dropped.pop(number, None)


def _watched(node: Any, callback: Any, *arguments: Any) -> weakref.finalize:
    watch = weakref.finalize(node, callback, *arguments)
    watch.atexit = False  # what lives until the end was not dropped
    return watch


# Each is called by `finalize`, and that by the line that drops the last reference.


def _send_was_dropped(number: int, here: int, peer: int, tag: int) -> None:
    _dropped[number] = f"send(rank={peer}, tag={tag})"
    warnings.warn(
        f"rank {here}: the delegate variable that {_dropped[number]} returned was dropped before "
        "backward came to it: what was sent gets no gradient. Keep it with pseudo_connect or as "
        "delegate_variable of the next recv, or call its backward; or send without gradients, "
        "in no_backprop_mode or the variable's array",
        RuntimeWarning,
        stacklevel=3,
    )


def _recv_was_dropped(here: int, peer: int, tag: int) -> None:
    warnings.warn(
        f"rank {here}: what recv(rank={peer}, tag={tag}) returned was dropped before backward "
        f"came to it: backward on rank {peer} would wait for its gradients. Run backward through "
        "it, or send without gradients, in no_backprop_mode or the variable's array",
        RuntimeWarning,
        stacklevel=3,
    )
