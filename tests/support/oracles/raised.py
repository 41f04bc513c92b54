"""What calls raise on the ranks that are wrong, and on the others."""

from __future__ import annotations

from typing import Any

import pytest

from chainermn_comm import PeerError


def raises_on_all(
    wrong: bool,
    error: type[BaseException] | tuple[type[BaseException], ...],
    match: str | None = None,
) -> Any:
    """That error where this rank is the wrong one, and elsewhere one that tells of it."""
    return pytest.raises(error if wrong else PeerError, match=match)
