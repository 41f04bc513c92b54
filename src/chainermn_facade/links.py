"""Links whose parts are on several ranks (none yet)."""

__all__: list[str] = []
