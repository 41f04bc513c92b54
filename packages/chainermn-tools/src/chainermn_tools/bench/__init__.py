"""Checks communicators' values, measures their speed, and shows it in tables and a picture."""

__all__: list[str] = []
