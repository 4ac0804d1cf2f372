"""The live tuning notebook: in a browser as a person works with it, and headless as papermill runs it."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import papermill
import pytest
import requests
from lab import Lab, lab
from playwright.sync_api import Locator, expect

from kit import measures, phases, store

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "notebooks" / "live_tuning.ipynb"
PICTURES = ROOT / "data" / "pictures"
PORT = int(os.environ.get("KIT_TEST_PORT", "8000")) + 7


def parameters(notebook: Path, **values: Any) -> None:
    """Write values into the parameters cell, as a person would."""
    nb = nbformat.read(notebook, as_version=4)
    (cell,) = [c for c in nb.cells if "parameters" in c.metadata.get("tags", ())]
    cell.source += "".join(f"\n{name} = {value!r}" for name, value in values.items())
    nbformat.write(nb, notebook)


def until(what: Callable[[], Any], within_s: float = 30.0) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := what()):
        assert time.monotonic() < deadline_s, "did not happen in time"
        time.sleep(0.02)
    return found


def serving_now() -> list[dict[str, Any]]:
    """What the replicas report of themselves, gone ones left out."""
    states = requests.get(f"http://127.0.0.1:{PORT}/kit", timeout=5).json()["replicas"]
    newest = max((s["t_s"] for s in states), default=0.0)
    return [s for s in states if newest - s["t_s"] < 3]


def row(it: Lab, knob: str) -> Locator:
    """A knob's control."""
    label = it.page.locator(".widget-label", has_text=re.compile(rf"^\s*{knob}\s*$"))
    return it.panel.locator(".kit-control").filter(has=label)


def write(it: Lab, knob: str, text: str) -> None:
    """Write a value into the field beside a slider, and wait until it serves."""
    field = row(it, knob).locator("input[type=text]")
    field.fill(text)
    field.press("Enter")
    applied(it, knob)


def applied(it: Lab, knob: str) -> None:
    """Until the control says so."""
    expect(row(it, knob).locator(".kit-good")).to_contain_text("applied in", timeout=30_000)


def test_a_person_tunes_a_running_deployment_in_the_browser(tmp_path: Path) -> None:
    with lab(tmp_path) as it:
        parameters(it.notebooks / NOTEBOOK.name, port=PORT, folder=str(tmp_path / "run"))
        it.open(NOTEBOOK.name)
        it.run_all(timeout_s=120)
        printed = it.cell_outputs()
        it.button("Start load").press("Enter")
        it.wait_for_text("requests under way", ".kit-line")
        (pid,) = {s["pid"] for s in serving_now()}

        # Ten moves by keyboard: how long until the server itself reports the new size?
        slider, took_s = it.slider("max_batch_size"), []
        time.sleep(6)  # the batches of 4 that later ones are compared with
        slider.focus()
        for size in (5, 6, 8, 10, 12, 10, 12, 16, 20, 16):
            was = int(slider.value_text().split()[0])
            began_s = time.monotonic()
            slider.press("ArrowRight" if size > was else "ArrowLeft")
            until(lambda size=size: all(  # type: ignore[misc]
                s["user_config"]["max_batch_size"] == size for s in serving_now()
            ))  # fmt: skip
            took_s.append(time.monotonic() - began_s)
            applied(it, "max_batch_size")
            time.sleep(max(0.0, began_s + 1.2 - time.monotonic()))
        assert statistics.median(took_s) < 1.5, took_s
        assert {s["pid"] for s in serving_now()} == {pid}
        time.sleep(4)

        # Autoscaling, by what is written beside the sliders.
        it.tab("Autoscaling").press("Enter")
        write(it, "max_replicas", "2")
        write(it, "target_ongoing_requests", "4")
        write(it, "num_replicas", "auto")
        until(lambda: len({s["pid"] for s in serving_now()}) == 2, 60)
        it.wait_for_text("2", ".kit-figures b")
        time.sleep(3)

        PICTURES.mkdir(parents=True, exist_ok=True)
        it.panel.locator(".kit-panel").first.scroll_into_view_if_needed()
        it.screenshot(PICTURES / "panel-light.png", height=1100)
        it.theme("dark")
        it.screenshot(PICTURES / "panel-dark.png", height=1100)
        it.screenshot(PICTURES / "panel-zoomed.png", height=1800, zoom=2.0)
        it.theme("light")

        it.button("Stop load").press("Enter")
        it.wait_for_text("no load", ".kit-line")
        assert it.cell_outputs() == printed
        assert it.stray_outputs() == []
        it.shutdown_kernel()
    with pytest.raises(requests.ConnectionError):
        serving_now()
    run = store.load(tmp_path / "run")
    moves = run.changes[run.changes["knob"] == "max_batch_size"]
    assert len(moves) == 10
    assert moves["error"].isna().all() or (moves["error"] == "").all()
    assert (run.changes["restarted_replicas"] == 0).all()
    found = phases.stretches(run).set_index("label")
    small, large = found.loc["users 0 → 32"], found.loc["max_batch_size 20 → 16"]
    assert large["batch_size"] > 2 * small["batch_size"]
    assert large["queueing_p50_s"] < 0.7 * small["queueing_p50_s"]
    assert measures.series(run, "serve", "running_replicas").max() == 2


def test_the_notebook_plays_a_script_where_no_page_is_open(tmp_path: Path) -> None:
    moves = [[5.0, "max_batch_size", 16], [11.0, "mark", "enough"]]
    notebook = shutil.copy(NOTEBOOK, tmp_path / NOTEBOOK.name)
    done = papermill.execute_notebook(
        notebook, tmp_path / "done.ipynb", kernel_name="python3", progress_bar=False,
        parameters={"moves": moves, "duration_s": 14.0, "port": PORT, "folder": str(tmp_path / "run")},
    )  # fmt: skip
    shown = [o for cell in done.cells for o in cell.get("outputs", ())]
    pages = [o["data"]["text/html"] for o in shown if "text/html" in o.get("data", {})]
    assert any("data:image/png;base64" in page for page in pages)
    assert not [o for o in shown if "widget-view" in str(o.get("data", {}))]
    run = store.load(tmp_path / "run")
    assert run.status == "complete"
    found: pd.DataFrame = phases.stretches(run).set_index("label")
    before, after = found.loc["users 0 → 32"], found.loc["max_batch_size 4 → 16"]
    # What the notebook teaches: throughput rises faster than inference, and queueing falls.
    assert after["throughput_rps"] > 1.3 * before["throughput_rps"]
    assert after["queueing_p50_s"] < before["queueing_p50_s"]
    assert after["inference_p50_s"] > before["inference_p50_s"]
