"""A real headless Chromium for the tests of pages, and what it said of a page."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def programs():
    """Chromium and its driver, or a skipped test that says what is missing."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        missing = "chromium" if chromium is None else "chromedriver"
        pytest.skip(f"no {missing} on this machine: apt-get install chromium chromium-driver")
    return chromium, driver


@contextlib.contextmanager
def browser(*, dark=False, width=1280):
    """A browser with a fresh profile; everything ends with the block."""
    chromium, driver = programs()
    from selenium import webdriver

    profile = tempfile.mkdtemp(prefix="chromium-")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (*FLAGS, f"--user-data-dir={profile}", "about:blank"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    page = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        media = {"features": [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield page
    finally:
        page.quit()
        shutil.rmtree(profile, ignore_errors=True)


def requests(page):
    """The addresses that pages asked for since the last call, but for data: URIs and the browser's own."""
    messages = [json.loads(entry["message"])["message"] for entry in page.get_log("performance")]
    addresses = [
        message["params"]["request"]["url"]
        for message in messages
        if message["method"] == "Network.requestWillBeSent"
    ]
    return [
        address for address in addresses if not address.startswith(("data:", "chrome:", "chrome-untrusted:"))
    ]


def console(page):
    """What the console said: errors and warnings."""
    return [entry["message"] for entry in page.get_log("browser")]


def opened(page, where):
    """Open a file or an address and return the text that is seen."""
    page.get(where.resolve().as_uri() if isinstance(where, Path) else where)
    return seen(page)


def seen(page):
    return page.execute_script("return document.querySelector('main').innerText")


def until(page, script, seconds=20):
    """Wait until a script returns something true, and return that."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(page, seconds, poll_frequency=0.05).until(lambda _: page.execute_script(script))
