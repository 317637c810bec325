"""A headless browser that looks at a file as on a screen of any width, in light or dark."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
DRIVER = "chromedriver"
#: What a browser does besides is neither wanted nor of any use here.
ARGUMENTS = (
    "--headless=new",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def why_not() -> str:
    """Return what is missing for a browser; empty where all is there."""
    missing = []
    if _browser() is None:
        missing.append(f"a browser ({', '.join(BROWSERS)})")
    if shutil.which(DRIVER) is None:
        missing.append(DRIVER)
    if importlib.util.find_spec("selenium") is None:
        missing.append("selenium")
    fix = "apt-get install chromium chromium-driver; pip install -r scripts/requirements-dev.txt"
    return f"needs {' and '.join(missing)}: {fix}" if missing else ""


class Browser:
    """One browser for many looks."""

    def __init__(self, folder: Path) -> None:
        """Start it.

        Args:
            folder: For all that it writes.
        """
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = _browser() or ""
        for argument in (*ARGUMENTS, f"--user-data-dir={folder}"):
            options.add_argument(argument)
        if os.geteuid() == 0:  # the sandbox refuses to run as root
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(shutil.which(DRIVER)))

    def look(self, path: Path, *, width: int, scheme: str) -> None:
        """Open a file anew.

        Args:
            path: Of the file.
            width: Of the screen, in pixels of the style sheet.
            scheme: "light" or "dark".
        """
        metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self._driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        self._driver.get(path.as_uri())

    def console(self) -> list[str]:
        """Return what it has complained of since the last call."""
        return [entry["message"] for entry in self._driver.get_log("browser")]

    def ask(self, expression: str) -> Any:
        """Return the value of an expression of JavaScript."""
        return self._driver.execute_script(f"return {expression}")

    def close(self) -> None:
        """End it."""
        self._driver.quit()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Open a browser for one file of tests; skip them where there is none."""
    if reason := why_not():
        pytest.skip(reason)
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)
