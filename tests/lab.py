"""JupyterLab as `make lab` starts it, used through a real browser: Debian's Chromium, by Playwright.

    with lab(tmp_path) as it:
        write(it.notebooks / "mine.ipynb", "import kit")
        it.open("mine.ipynb")
        it.run_all()

`it.notebooks` is a copy of the tree's notebooks: JupyterLab saves what it opens.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from lab_server import MARK, Server, jupyterlab, shutdown_kernels
from playwright.sync_api import Locator, Page, expect, sync_playwright

WIDTH, HEIGHT = 1280, 900
"""Size of the window, pixels of CSS."""
WAIT_S = 30.0
"""How long any of it may take on a busy machine; each call returns as soon as it is done."""


@dataclass(frozen=True)
class Slider:
    """An ipywidgets slider, moved as people without a mouse do."""

    root: Locator

    def focus(self) -> None:
        self.root.locator(".noUi-handle").first.focus()

    def press(self, key: str, n: int = 1) -> None:
        """`ArrowRight`, `PageUp`, `Home`, `End`, …, n times; the slider must have the focus."""
        for _ in range(n):
            self.root.page.keyboard.press(key)

    def value_text(self) -> str:
        return self.root.locator(".widget-readout").inner_text()


@dataclass(frozen=True)
class Lab:
    """What a person does in one JupyterLab; waits end after `timeout_s` with an error."""

    page: Page
    server: Server

    @property
    def notebooks(self) -> Path:
        """Where notebooks are put before they are opened: a copy of the tree's."""
        return self.server.notebooks

    @property
    def panel(self) -> Locator:
        """The notebook in front."""
        return self.page.locator(".jp-NotebookPanel:visible")

    def open(self, name: str, timeout_s: float = 2 * WAIT_S) -> None:
        """Open a notebook of `self.notebooks`, or load it anew; returns when its kernel is idle."""
        self.page.goto(f"{self.server.url}/lab/tree/{name}", timeout=timeout_s * 1e3)
        # The notebook's own indicator says idle before there is a kernel.
        kernel = self.page.locator("#jp-main-statusbar").get_by_text("| Idle")
        kernel.wait_for(timeout=timeout_s * 1e3)
        expect(self.panel).to_have_count(1)
        if self.page.locator("#jp-left-stack").is_visible():
            self.page.keyboard.press("Control+b")  # the file browser takes a quarter of the width
            expect(self.page.locator("#jp-left-stack")).to_be_hidden()

    def menu(self, *path: str) -> None:
        """Choose a menu item: `menu("Kernel", "Interrupt Kernel")`."""
        self.page.locator("#jp-MainMenu .lm-MenuBar-itemLabel", has_text=_exactly(path[0])).click()
        for part in path[1:]:
            label = self.page.locator(".lm-Menu-itemLabel:visible", has_text=_exactly(part))
            label.hover()
            label.click()

    def run_all(self, timeout_s: float = 2 * WAIT_S) -> float:
        """Run all cells; seconds until the last one ended."""
        return self._run("Run", "Run All Cells", timeout_s)

    def restart_and_run_all(self, timeout_s: float = 2 * WAIT_S) -> float:
        """Restart the kernel and run all cells; seconds until the last one ended."""
        return self._run("Run", "Restart Kernel and Run All Cells…", timeout_s)

    def _run(self, menu: str, item: str, timeout_s: float) -> float:
        # A cell shows [*] from the call on; without seeing one, the last run would pass for this one.
        self.page.evaluate(
            """() => { window.kitRan = false; const starred = () => [...document.querySelectorAll(
                '.jp-CodeCell .jp-InputPrompt')].some(p => p.textContent.includes('*'));
              const watch = new MutationObserver(() => { window.kitRan ||= starred(); });
              watch.observe(document.body, {subtree: true, childList: true, characterData: true});
              window.kitDone = () => window.kitRan && !starred(); }"""
        )
        began_s = time.monotonic()
        self.menu(menu, item)
        if "Restart" in item:
            self.page.locator(".jp-Dialog-button.jp-mod-accept").click()
        self.page.wait_for_function("() => window.kitDone()", timeout=timeout_s * 1e3)
        return time.monotonic() - began_s

    def slider(self, label: str) -> Slider:
        """The slider with this description."""
        label_of = self.page.locator(".widget-label", has_text=_exactly(label))
        return Slider(self.panel.locator(".widget-slider, .widget-hslider").filter(has=label_of))

    def button(self, text: str) -> Locator:
        """`.click()` with the mouse; `.press("Enter")` with the keyboard."""
        return self.panel.get_by_role("button", name=text, exact=True)

    def checkbox(self, label: str) -> Locator:
        """`.check()`, `.uncheck()`, `.press("Space")`, `.is_checked()`."""
        return self.panel.get_by_role("checkbox", name=label, exact=True)

    def dropdown(self, label: str) -> Locator:
        """`.select_option(text)`, `.input_value()`."""
        return self.panel.get_by_label(label, exact=True)

    field = dropdown
    """A text or number field: `.fill(text)`, `.press("Enter")`."""

    def tab(self, title: str) -> Locator:
        """A page of a Tab widget: `.click()`."""
        return self.panel.get_by_role("tab", name=title, exact=True)

    def text(self, selector: str) -> str:
        return self.panel.locator(selector).first.inner_text()

    def wait_for_text(
        self, text: str | re.Pattern[str], selector: str, timeout_s: float = WAIT_S
    ) -> None:
        """Until one element of the selector contains the text."""
        found = self.panel.locator(selector).filter(has_text=text).first
        expect(found).to_be_visible(timeout=timeout_s * 1e3)

    def cell_outputs(self) -> list[str]:
        """What each code cell printed, raised or returned, widgets left out; "" where nothing."""
        found: list[str] = self.panel.locator(".jp-CodeCell").evaluate_all(
            """cells => cells.map(cell => [...cell.querySelectorAll('.jp-OutputArea-output')]
              .filter(out => !out.matches('.jupyter-widgets') && !out.querySelector('.jupyter-widgets'))
              .map(out => out.textContent).join('\\n'))"""
        )
        return found

    def stray_outputs(self) -> list[str]:
        """What callbacks printed or raised since last asked: it stands in JupyterLab's log console."""
        self.menu("View", "Show Log Console")
        log = self.page.locator(".jp-LogConsole")
        mark = log.locator(".jp-OutputArea-output hr")
        # The console draws late but in order: what stands before a mark set now is all there was.
        self.page.get_by_role("button", name="Add Checkpoint").click()
        expect(mark).to_have_count(1)
        found = log.locator(".jp-OutputArea-output:not(:has(hr))").all_text_contents()
        self.page.get_by_role("button", name="Clear Log").click()
        expect(mark).to_have_count(0)
        self.menu("View", "Show Log Console")
        expect(log).to_have_count(0)
        return found

    def theme(self, name: str) -> None:
        """`"dark"` or `"light"`, by the Settings menu, as people do it."""
        self.menu("Settings", "Theme", f"JupyterLab {name.capitalize()}")
        light = str(name == "light").lower()
        self.page.locator(f"body[data-jp-theme-light={light}]").wait_for(state="attached")

    def screenshot(
        self, path: Path, width: int = WIDTH, height: int = HEIGHT, zoom: float = 1.0
    ) -> None:
        """A picture of a window of width × height device pixels, at the browser's zoom."""
        window = self.page.context.new_cdp_session(self.page)
        size = {"width": round(width / zoom), "height": round(height / zoom), "mobile": False}
        window.send("Emulation.setDeviceMetricsOverride", size | {"deviceScaleFactor": zoom})
        self.page.wait_for_timeout(500)  # JupyterLab lays out again a moment after a resize
        # Playwright's own picture would set its window's size again.
        path.write_bytes(base64.b64decode(window.send("Page.captureScreenshot")["data"]))
        window.detach()
        for height in (HEIGHT + 1, HEIGHT):  # a size that Playwright believes to be set is not sent
            self.page.set_viewport_size({"width": WIDTH, "height": height})

    def save(self) -> None:
        """What is saved comes back when the notebook is opened again, live widgets too; nothing else."""
        self.menu("File", "Save Notebook")
        expect(self.page.locator(".lm-TabBar-tab.jp-mod-dirty")).to_have_count(0)

    def close_notebook(self) -> None:
        """Close the tab without saving; the kernel stays, as JupyterLab has it by default."""
        changed = self.page.locator(".lm-TabBar-tab.lm-mod-current.jp-mod-dirty").count()
        self.menu("File", "Close Tab")
        if changed:
            self.page.locator(".jp-Dialog").get_by_role("button", name="Discard").click()
        expect(self.page.locator(".jp-NotebookPanel")).to_have_count(0)

    def kernels(self) -> list[dict[str, Any]]:
        """The kernels that run, as the server tells them."""
        found: list[dict[str, Any]]
        found = self.server.api.get(f"{self.server.url}/api/kernels", timeout=10).json()
        return found

    def shutdown_kernel(self) -> None:
        """Shut down every kernel; returns when the server has none."""
        shutdown_kernels(self.server.url, self.server.api)
        assert not self.kernels()


def write(path: Path, *sources: str) -> None:
    """A notebook with a code cell for each source."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


@contextmanager
def lab(folder: Path, port: int = 0) -> Iterator[Lab]:
    """JupyterLab on a copy of the notebooks under `folder`, in a browser; ends all that came of it.

    Raises RuntimeError when there is no Chromium, and where `jupyterlab` does.
    """
    chromium = shutil.which("chromium")
    if chromium is None:
        raise RuntimeError("no chromium on the path: apt-get install chromium")
    expect.set_options(timeout=WAIT_S * 1e3)
    with jupyterlab(folder, port) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=chromium, env={**os.environ, MARK: server.mark}
        )
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT})
        # By cookie: an address with the token in it would end up in error texts.
        for name, value in server.api.cookies.items():
            context.add_cookies([{"name": name, "value": value, "url": server.url}])
        try:
            yield Lab(context.new_page(), server)
        finally:
            browser.close()


def _exactly(text: str) -> re.Pattern[str]:
    return re.compile(rf"^\s*{re.escape(text)}\s*$")
