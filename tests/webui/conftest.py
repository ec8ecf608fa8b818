"""What the tests of the page share."""

import contextlib
import shutil

import pytest

from webui.places import Places

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture
def here(tmp_path):
    """The folders of a page, empty."""
    for name in ("data", "runs"):
        (tmp_path / name).mkdir()
    return Places(tmp_path / "data", tmp_path / "runs")


@pytest.fixture(scope="session")
def browser():
    """Chromium of the system, through playwright."""
    program = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(CHROMIUM)} is installed")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Prints the text of the pages that are open when a browser test fails."""
    if call.when == "call" and call.excinfo and "browser" in item.funcargs:
        for context in item.funcargs["browser"].contexts:
            for page in context.pages:
                with contextlib.suppress(Exception):
                    print(f"--- {page.url}\n{page.inner_text('body')}")
    return (yield)
