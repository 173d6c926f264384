"""A browser without a window, and what it sees of a Bokeh page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from tests.cluster.helpers import PATIENCE
from tests.tools import require_tool

#: Where pictures are left; kept by those who run the tests.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

_COLUMNS = """
const model = Bokeh.documents[0].get_model_by_name(arguments[0]);
const columns = {};
for (const [name, values] of Object.entries(model.data))
    columns[name] = Array.from(values);
return JSON.stringify(columns);
"""
_PROPERTY = """
return Bokeh.documents[0].get_model_by_name(arguments[0])[arguments[1]];
"""
_TEXT = """
const model = Bokeh.documents[0].get_model_by_name(arguments[0]);
const elements = Bokeh.index.find_one(model).shadow_el.querySelectorAll("*");
return Array.from(elements)
    .filter(element => element.localName != "style" && !element.children.length)
    .map(element => element.textContent).join("|");
"""
_MARKUP = """
const model = Bokeh.documents[0].get_model_by_name(arguments[0]);
return Bokeh.index.find_one(model).shadow_el.innerHTML;
"""
_FILLS = """
const row = Bokeh.documents[0].get_model_by_name(arguments[0]);
return row.children.map(plot => {
    const view = Bokeh.index.find_one(plot).views.find_one(plot.renderers[0]);
    return view.glyph.fill_color.get(0);
});
"""
_CHILDREN = """
return Bokeh.documents[0].roots()[0].children.map(child => child.name);
"""
_IS_SHOWN = """
const made = window.Bokeh && Bokeh.documents.length && Bokeh.documents[0].is_idle;
return Boolean(made);
"""


class Page:
    """A Bokeh page that is open.

    Parameters
    ----------
    driver
        The browser.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Open an address, and wait until all is drawn."""
        self.driver.get(url)
        self.until(lambda: self.driver.execute_script(_IS_SHOWN))

    def leave(self) -> None:
        """Close what is open, and forget what the browser has said of it."""
        self.driver.get("about:blank")
        self.complaints()

    def columns(self, source: str) -> dict[str, list[Any]]:
        """What a source holds, by its name, as the browser has it."""
        return json.loads(self.driver.execute_script(_COLUMNS, source))

    def has(self, model: str) -> bool:
        """Whether a model of this name is what the page consists of."""
        return self.driver.execute_script(_CHILDREN) == [model]

    def text(self, model: str) -> str:
        """What is drawn of a table or a text, by its model's name."""
        return self.driver.execute_script(_TEXT, model)

    def markup(self, model: str) -> str:
        """The same with its HTML."""
        return self.driver.execute_script(_MARKUP, model)

    def fills(self, plots: str) -> list[int]:
        """The colours that the first bars of the plots in a row are filled with."""
        return self.driver.execute_script(_FILLS, plots)

    def value(self, model: str, attribute: str) -> Any:
        """A property of a model, by its name."""
        return self.driver.execute_script(_PROPERTY, model, attribute)

    def choose(self, deployment: str) -> None:
        """Choose a deployment, as a user does."""
        self.driver.execute_script(
            "Bokeh.documents[0].get_model_by_name('deployment').value = arguments[0]",
            deployment,
        )

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until something is so; from a thread that is no event loop's."""
        deadline = time.monotonic() + PATIENCE
        while not (found := condition()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never was so: {condition}")
            time.sleep(0.05)
        return found

    def complaints(self) -> list[str]:
        """What the browser has logged as errors since it was asked last."""
        log = self.driver.get_log("browser")
        return [entry["message"] for entry in log if entry["level"] == "SEVERE"]

    def picture(self, name: str) -> Path:
        """Leave a picture of what is seen."""
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        self.driver.save_screenshot(str(path))
        return path


@contextmanager
def browser(width: int = 1366, height: int = 768) -> Iterator[Page]:
    """Start Chromium, with the screen of a laptop."""
    options = webdriver.ChromeOptions()
    options.binary_location = require_tool("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for argument in (
        "--headless=new",
        f"--window-size={width},{height}",
        "--hide-scrollbars",
        # Tests run as root in containers, which have neither.
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        # Nothing is fetched but from the scheduler.
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
    ):
        options.add_argument(argument)
    environment = {**os.environ, "SE_OFFLINE": "true"}
    service = Service(require_tool("chromedriver"), env=environment)
    driver = webdriver.Chrome(options=options, service=service)
    try:
        # Without a window, what surrounds the page takes part of its height.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {
                "width": width,
                "height": height,
                "deviceScaleFactor": 1,
                "mobile": False,
            },
        )
        yield Page(driver)
    finally:
        driver.quit()
