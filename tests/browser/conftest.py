"""One JupyterLab and one browser for all browser tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.browser.lab import Server, Session, browsing, chromium, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why where there is no browser, rather than fail."""
    missing = "no chromium here (Debian: apt-get install chromium)" if chromium() is None else ""
    try:
        import playwright  # noqa: F401
    except ImportError:
        missing = "playwright is not installed (pip install playwright)"
    for item in items:
        if "browser" in item.keywords and missing:
            item.add_marker(pytest.mark.skip(reason=missing))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """JupyterLab over an empty folder."""
    with serving(tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("jupyter")) as running:
        yield running


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsing(tmp_path_factory.mktemp("profile")) as running:
        yield running


@pytest.fixture(scope="module")
def session(browser: Any) -> Iterator[Session]:
    """A page of one module's tests."""
    opened = Session(browser)
    yield opened
    opened.page.close()
