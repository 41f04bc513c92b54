"""What mkdocs.yml can't say itself: every decision is in the navigation, and listed on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def decisions(config: Any) -> list[Path]:
    folder = Path(config.docs_dir) / "decisions"
    return sorted(page for page in folder.glob("*.md") if page.name != "README.md")


def on_config(config: Any) -> Any:
    for entry in config.nav:
        if "Decisions" in entry:
            entry["Decisions"] += [f"decisions/{page.name}" for page in decisions(config)]
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    if page.file.src_uri != "decisions/README.md":
        return markdown
    titles = [(page.read_text().partition("\n")[0][2:], page.name) for page in decisions(config)]
    return markdown + "\n" + "".join(f"- [{title}]({name})\n" for title, name in titles)
