"""Files that tests make."""

from __future__ import annotations

from pathlib import Path


def write(path: Path, content: str) -> None:
    """Write a file, and make the folders that it takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
