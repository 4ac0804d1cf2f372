"""Notebooks as people use them: in JupyterLab as `make lab` starts it, in a real browser."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from pathlib import Path

import pytest
import requests
from lab import lab, write
from lab_server import MARK, descended
from PIL import Image

SLIDER = """\
import ipywidgets as widgets
from IPython.display import display

import kit

said = widgets.HTML().add_class("said")
size = widgets.SelectionSlider(options=[1, 2, 4, 8], value=2, description="max_batch_size")
size.observe(lambda change: said.set_trait("value", f"serving {change.new}"), "value")
fail = widgets.Button(description="Fail")
fail.on_click(lambda button: said.set_trait("value", "failing") or 1 / 0)
display(widgets.VBox([size, said, fail]))"""


@pytest.mark.cluster
def test_a_slider_moved_by_keyboard_reaches_its_callback_in_the_kernel(tmp_path: Path) -> None:
    with lab(tmp_path) as it:
        write(it.notebooks / "slider.ipynb", SLIDER, "kit.Settings().max_batch_size")
        it.open("slider.ipynb")
        it.run_all()
        shown, printed = it.cell_outputs()
        assert (shown, printed.strip().isdigit()) == ("", True)

        size = it.slider("max_batch_size")
        assert size.value_text() == "2"
        size.focus()
        size.press("ArrowRight", 2)
        it.wait_for_text("serving 8", ".said")
        assert size.value_text() == "8"

        assert it.stray_outputs() == []
        it.button("Fail").press("Enter")
        it.wait_for_text("failing", ".said")
        assert it.cell_outputs() == [shown, printed]
        until_s = time.monotonic() + 30  # the kernel takes a moment to word a traceback
        while not (stray := it.stray_outputs()) and time.monotonic() < until_s:
            pass
        assert "ZeroDivisionError" in stray[0]

        it.screenshot(tmp_path / "zoomed.png", zoom=2.0)
        assert Image.open(tmp_path / "zoomed.png").size == (1280, 900)

        it.save()  # live widgets come back with a notebook that was saved
        it.open("slider.ipynb")
        it.wait_for_text("failing", ".said")

        saved = (it.notebooks / "slider.ipynb").read_bytes()
        it.restart_and_run_all()
        assert it.slider("max_batch_size").value_text() == "2"
        it.close_notebook()
        assert (it.notebooks / "slider.ipynb").read_bytes() == saved
        assert len(it.kernels()) == 1  # closing a tab ends no kernel
        it.shutdown_kernel()
    with pytest.raises(requests.ConnectionError):
        requests.get(it.server.url, timeout=5)


def test_what_a_notebook_left_running_is_found_under_any_parent() -> None:
    mark = secrets.token_hex(8)
    subprocess.run("setsid sleep 60 &", shell=True, check=True, env=os.environ | {MARK: mark})
    until_s = time.monotonic() + 30
    while not (found := descended(mark)) and time.monotonic() < until_s:  # it is just being started
        pass
    ((pid, command),) = found.items()
    assert "sleep 60" in command
    os.kill(pid, signal.SIGKILL)
