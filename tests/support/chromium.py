import contextlib
import json
import shutil
import time

import pytest


@contextlib.contextmanager
def chromium():
    """Run Chromium. Yields its driver, with the names of keys as `keys` and a pointer as `pointer`."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium")
    from selenium.webdriver.common.keys import Keys

    names = ("google-chrome", "chromium", "chromium-browser")
    binary, driver = next(filter(None, map(shutil.which, names)), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "window-size=1100,900"):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    browser.keys = Keys
    browser.pointer = webdriver.ActionChains(browser)
    try:
        yield browser
    finally:
        browser.quit()


def requested_urls(browser):
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    return [item["params"]["request"]["url"] for item in messages if item["method"] == "Network.requestWillBeSent"]


def texts(browser, selector):
    """Return the texts of all elements, white space as it is."""
    script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
    return browser.execute_script(script, selector)


def one(browser, selector):
    [element] = browser.find_elements("css selector", selector)
    return element


def wait_for(condition, seconds=20):
    """Wait until a function returns a true value, and return the value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page did not change"
        time.sleep(0.02)
    return value
