"""A headless Chromium that opens a page from a file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.jobs.commands import run

SECONDS = 60.0  # ends a hang, no more
NAMES = ("chromium", "chromium-browser", "google-chrome")
# As root it has no sandbox, and in a container little of /dev/shm.
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


def opened(page: Path) -> str:
    """The page's document as HTML, once its scripts ran; skips the test where no browser is."""
    browser = next(filter(None, map(shutil.which, NAMES)), None)
    if browser is None:
        pytest.skip("there is no Chromium on PATH: apt-get install chromium")
    profile = f"--user-data-dir={page.parent / 'profile'}"
    done = run(browser, *OPTIONS, profile, "--dump-dom", page.as_uri(), seconds=SECONDS)
    assert done.returncode == 0, done.stderr
    return done.stdout
