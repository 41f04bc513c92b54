"""What mkdocs.yml can't say itself: all decisions are listed, and sections of READMEs shown."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any


def decisions(config: Any) -> list[Path]:
    folder = Path(config.docs_dir) / "decisions"
    return sorted(page for page in folder.glob("*.md") if page.name != "README.md")


def on_config(config: Any) -> Any:
    for entry in config.nav:
        if "Decisions" in entry:
            entry["Decisions"] += [
                f"decisions/{page.name}" for page in decisions(config)
            ]
    return config


# A section of a README, which is written there alone: its path from the repository, and
# its title.
TAKEN = re.compile(r"<!-- from: (\S+), (.*?) -->")


def section(found: re.Match[str]) -> str:
    text = (Path(__file__).parents[1] / found[1]).read_text()
    body = text.partition(f"\n## {found[2]}\n")[2].partition("\n## ")[0]
    assert body, f"{found[1]} has no section {found[2]}"
    return body.replace("](../../docs/", "](").strip()


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    markdown = TAKEN.sub(section, markdown)
    if page.file.src_uri != "decisions/README.md":
        return markdown
    titles = [
        (page.read_text().partition("\n")[0][2:], page.name)
        for page in decisions(config)
    ]
    return markdown + "\n" + "".join(f"- [{title}]({name})\n" for title, name in titles)
