"""A browser without a window, and what it sees of a Bokeh page."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.select import Select

from tests.cluster.helpers import PATIENCE
from tests.tools import require_tool

#: Where pictures are left; kept by those who run the tests.
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

#: Of modules whose tests look at pages.
MARKS = [
    pytest.mark.browser,
    pytest.mark.usefixtures("collect"),
    # Bokeh leaves what it was about to send to a page that is closed.
    pytest.mark.filterwarnings(
        "ignore:coroutine 'WSHandler.send_message' was never awaited:RuntimeWarning"
    ),
]

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
_SELECT = """
const model = Bokeh.documents[0].get_model_by_name(arguments[0]);
return Bokeh.index.find_one(model).shadow_el.querySelector("select");
"""
# What a user would have to scroll for, or not see at all.
_FLAWS = """
const flaws = [], placed = [];
const pen = document.createElement("canvas").getContext("2d");
const page = document.documentElement;
if (page.scrollWidth > page.clientWidth)
    flaws.push(`the page is ${page.scrollWidth} px wide, not ${page.clientWidth}`);
const kinds = ["Figure", "DataTable", "Div", "Select"];
for (const model of Bokeh.documents[0].all_models) {
    const view = kinds.includes(model.type) ? Bokeh.index.find_one(model) : null;
    if (!view) continue;
    const box = view.el.getBoundingClientRect();
    const name = model.title?.text ?? model.name ?? model.type;
    placed.push([name, box]);
    if (box.left < 0 || box.right > page.clientWidth + 1)
        flaws.push(`${name} is from ${box.left} to ${box.right} px`);
    if (model.type == "Figure") {
        const frame = view.frame.bbox;
        const {text, text_font, text_font_size, text_font_style} = model.title;
        pen.font = `${text_font_style} ${text_font_size} ${text_font}`;
        const end = frame.left + pen.measureText(text).width;
        if (end > box.width) flaws.push(`the title of ${name} ends at ${end} px`);
        for (const legend of model.center.filter(part => part.type == "Legend")) {
            const drawn = view.views.find_one(legend).el.getBoundingClientRect();
            if (drawn.left < box.left + frame.left - 1 || drawn.right > box.right + 1)
                flaws.push(`the legend of ${name} is ${drawn.width} px wide`);
        }
    }
    if (model.type == "DataTable") {
        const seen = view.shadow_el.querySelector(".slick-viewport");
        if (seen.scrollWidth > seen.clientWidth + 1)
            flaws.push(`the columns of ${name} need ${seen.scrollWidth} px`);
        for (const head of view.shadow_el.querySelectorAll(".slick-column-name"))
            if (head.offsetWidth > head.parentElement.clientWidth)
                flaws.push(`${name}: ${head.textContent} is cut`);
    }
    if (model.type == "Div") {
        const parts = view.shadow_el.querySelectorAll("*");
        for (const part of parts) {
            const right = part.getBoundingClientRect().right;
            const is_cut = part.clientWidth && part.scrollWidth > part.clientWidth + 1;
            if (is_cut || right > box.right + 1)
                flaws.push(`${part.textContent} is cut`);
        }
    }
}
for (const [i, [name, a]] of placed.entries())
    for (const [other, b] of placed.slice(i + 1))
        if (
            Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
            && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1
        ) flaws.push(`${name} and ${other} overlap`);
return [placed.length, flaws];
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
        """Choose a deployment in the list, as a user does, by clicks."""
        choice = self.driver.execute_script(_SELECT, "deployment")
        Select(choice).select_by_visible_text(deployment)

    def flaws(self) -> list[str]:
        """What of the page does not fit the screen, is cut, or covers something."""
        parts, found = self.driver.execute_script(_FLAWS)
        assert parts, "nothing is drawn"
        return list(found)

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
