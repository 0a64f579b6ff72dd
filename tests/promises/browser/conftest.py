"""A real browser over a real server: chromium, driven by Playwright, and `ragfuse serve` with the
embedded model.

`make test-browser` runs these tests; pictures go to the folder in PAGE_PICTURES, else to a
temporary one.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright", reason="playwright is not installed: make test-browser")
pytest.importorskip("fastapi", reason="the server's extra is not installed")

from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from ragfuse import Settings
from tests.kits.serve import process

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MAX_PICTURE_NBYTES = 150_000
PATIENCE_MS = 120_000
KEY = "a-key-of-the-page-tests"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser, without a window."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no chromium was found: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=found, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def address(
    smollm_path: Path, minilm_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A server with the default model, on loopback, without keys."""
    settings = Settings(store=tmp_path_factory.mktemp("page") / "store")
    with process(settings) as (_, address):
        yield address


@pytest.fixture(scope="session")
def locked(varied_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that wants a key, with a tiny model."""
    home = tmp_path_factory.mktemp("locked")
    settings = Settings(
        model=str(varied_path), dtype="float32", store=home / "store", home=home, max_tokens=12
    )
    with process(settings, RAGFUSE_API_KEYS=KEY) as (_, address):
        yield address


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    """Windows of one visitor, whose errors fail the test."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, color_scheme="light")
    context.set_default_timeout(PATIENCE_MS)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """One window. What its console tells of errors, or of what the content policy refused, fails
    the test.
    """
    page, wrong = context.new_page(), list[str]()
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if _is_wrong(said) else None)
    page.on(
        "request", lambda request: wrong.append(request.url) if _is_foreign(request.url) else None
    )
    yield page
    assert wrong == []


@pytest.fixture(scope="session")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Take a picture of a page, in few colours."""
    folder = Path(os.environ.get("PAGE_PICTURES") or tmp_path_factory.mktemp("pictures"))
    folder.mkdir(parents=True, exist_ok=True)

    def take(page: Page, name: str, **options: Any) -> Path:
        image = Image.open(io.BytesIO(page.screenshot(animations="disabled", **options)))
        target = folder / f"{name}.png"
        image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(target, optimize=True)
        assert target.stat().st_size < MAX_PICTURE_NBYTES
        return target

    return take


def _is_wrong(said: Any) -> bool:
    """Errors, but for refusals that the page tells itself."""
    return said.type == "error" and "status of 4" not in said.text


def _is_foreign(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))
