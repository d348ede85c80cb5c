"""A real browser on Ray's dashboard: opens pages, waits for their content, and takes screenshots.

HOLDFAST_SCREENSHOTS=docs/images writes the pictures that the documentation shows.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BOUND_MS = 120_000
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1500, "height": 900}


def program() -> str:
    """Path of a browser. Skips where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed; `make test` does it")
    for name in PROGRAMS:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium here: apt-get install chromium-headless-shell")


class Browser:
    """One page of one dashboard."""

    def __init__(self, page: Any, dashboard: str, pictures: Path) -> None:
        self.page, self._dashboard, self._pictures = page, dashboard, pictures

    def open(self, place: str) -> None:
        # A new page each time: Ray's pages keep what they fetched before.
        self.page.goto("about:blank")
        self.page.goto(f"{self._dashboard}/#/{place}", wait_until="load")

    def shows(self, text: str) -> Any:
        """The first element with this text, once it exists."""
        found = self.page.get_by_text(text).first
        found.wait_for()
        return found

    def row(self, *texts: str) -> str:
        """The text of the table row that has all of these, once it exists."""
        rows = self.page.locator("tbody tr")
        for text in texts:
            rows = rows.filter(has_text=text)
        rows.first.wait_for()
        return str(rows.first.inner_text())

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self._pictures / f"{name}.png")


@contextmanager
def opened(dashboard: str, pictures: Path) -> Iterator[Browser]:
    path = program()
    from playwright.sync_api import sync_playwright

    pictures = Path(os.environ.get("HOLDFAST_SCREENSHOTS", pictures))
    with sync_playwright() as playwright:
        # Chromium's sandbox refuses to run as root, as in containers.
        words = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=path, args=words)
        page = browser.new_page(viewport=SIZE)
        page.set_default_timeout(BOUND_MS)
        try:
            yield Browser(page, dashboard, pictures)
        finally:
            browser.close()
