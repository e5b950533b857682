"""A real Chromium for tests of the page: started once a module, its console watched, its screenshots kept."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

SHOTS = Path(__file__).resolve().parents[2] / "artefacts" / "page"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The system's Chromium; `make browser` installs it."""
    path = shutil.which("chromium")
    assert path is not None, "Chromium isn't installed: `make browser` (as root, on Debian) installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(
    browser: Browser, url: str, view: str = "now", *, width: int = 1280, scheme: Any = "light", **options: Any
) -> Iterator[Page]:
    """A page at a view; fails where its console told an error, or it asked another host."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
    page = context.new_page()
    page.set_default_timeout(15_000)
    wrong: list[str] = []
    page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((url, "data:")) else wrong.append(r.url))
    page.wrong = wrong  # type: ignore[attr-defined]
    page.goto(f"{url}/#{view}")
    try:
        yield page
        assert not wrong, wrong
    finally:
        context.close()


def shot(page: Page, name: str) -> None:
    """Keep a picture of the whole page."""
    SHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SHOTS / f"{name}.png", full_page=True)
