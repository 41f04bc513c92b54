"""What mkdocs.yml can't say itself: the decisions are in the navigation, every one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    folder = Path(config.docs_dir) / "decisions"
    pages = sorted(page.name for page in folder.glob("*.md") if page.name != "README.md")
    for entry in config.nav:
        if "Decisions" in entry:
            entry["Decisions"] += [f"decisions/{name}" for name in pages]
    return config
