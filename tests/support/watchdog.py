"""The watchdog's inside, for tests of what it tells; none of it needs a monitor."""

from __future__ import annotations

from typing import Any


def communicator_within(name: str, seconds: float = 600.0, silence: float = 20.0) -> Any:
    """A communicator with other limits than the default's, which report and end nothing.

    Args:
        name: as `create_communicator` takes it.
        seconds: after which a waiting call is reported.
        silence: of another machine's monitor that means a cut link, in seconds.
    """
    from chainermn_comm.catalogue import make_communicator
    from chainermn_comm.watchdog import Limit

    return make_communicator(name, limit=Limit(seconds, silence=silence))
