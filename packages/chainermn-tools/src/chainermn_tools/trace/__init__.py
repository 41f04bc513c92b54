"""Merges the trace files of a job's ranks, and says which calls took the time and who was late."""

__all__: list[str] = []
