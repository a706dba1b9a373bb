"""Pictures as PNG, converted from our SVG by an installed browser, so that evenpipe needs no library for it."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from evenpipe.errors import InputError, RunError
from evenpipe.given import plain

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 120.0
"""Time limit for the browser."""


def find_browser() -> str:
    """The path of a Chromium or Chrome. Raises InputError if there is none."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise InputError(
            "a picture in .png needs Chromium or Chrome in the path (on Debian: apt-get install chromium); .svg needs"
            " nothing"
        )
    return browser


def png(picture: str) -> bytes:
    """One of our SVG documents as PNG, at two pixels per unit. Raises InputError, or RunError if the browser
    fails."""
    browser = find_browser()
    size = re.search(r'width="([\d.]+)" height="([\d.]+)"', picture)
    assert size is not None, "our pictures give their size"
    width, height = (round(float(text)) for text in size.groups())
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source, target = Path(folder, "picture.svg"), Path(folder, "picture.png")
        source.write_text(picture, encoding="utf-8")
        command = [
            *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
            *("--force-device-scale-factor=2", f"--window-size={width},{height}", f"--user-data-dir={folder}/profile"),
            *(f"--screenshot={target}", source.as_uri()),
        ]
        try:
            completed = subprocess.run(command, capture_output=True, timeout=SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RunError(f"{browser} did not turn the picture into PNG: {plain(error)}") from None
        if not target.is_file():
            raise RunError(
                f"{browser} did not turn the picture into PNG: it ended with exit code {completed.returncode}"
            )
        return target.read_bytes()
