"""The report: its parameters, its experiments, and the command that runs it headless.

`python -m kit.report -p users 64` executes `notebooks/report.ipynb` with papermill and writes a
folder with the HTML, the executed notebook, the run's tables and `summary.json`.

With `recorded`, the folder of a run that is there already, nothing is deployed and no load is sent:
the report tells of that run. It goes to a new folder in `reports/`, never into the run's own, so that
a session can be reported on again, and while it lasts.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import json
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kit import experiment, measures, store, summary
from kit.parameters import ReportError, literal
from kit.progress import waiting
from kit.report_parameters import (
    Parameters,
    comparison,
    main_experiment,
    read_parameters,
    settings,
)
from kit.store import Run

if TYPE_CHECKING:
    from IPython.display import Markdown

    from kit.serving import Serving

__all__ = [  # noqa: RUF022  as people use them
    "Parameters", "ReportError", "read_parameters", "main_experiment", "comparison", "folder",
    "start", "main_run", "compared", "left_out", "marks", "write_summary", "of", "main",
]  # fmt: skip

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "report.ipynb"
EXPERIMENT_TAG = "experiment"
"""Of cells that speak of the report's own experiment: a report on another run is made without."""


def folder(p: Parameters) -> Path:
    """Where this report goes: as asked, or a new folder in `reports/`."""
    return Path(p.folder) if p.folder else ROOT / "reports" / store.new_id("report")


def start(p: Parameters) -> Serving | None:
    """Ray and Serve for the report's own runs; None for a recorded one."""
    if p.recorded:
        return None
    from kit import serving

    return serving.start(settings(p), port=p.port)


def main_run(p: Parameters, serving: Serving | None, place: Path) -> Run:
    """The run that the report is about: recorded, or run now into `place`."""
    if serving is None:
        return store.load(Path(p.recorded))
    return experiment.run(main_experiment(p), serving, place, agreement=True)


def compared(p: Parameters, serving: Serving | None, place: Path) -> dict[str, Run] | None:
    """The runs of the comparison by name, after which `serving` is shut down; None if recorded."""
    if serving is None:
        return None
    runs = experiment.run_many(comparison(p), serving, place / "compare")
    serving.shutdown()
    return {r.experiment["name"]: r for r in runs}


def left_out(p: Parameters) -> Markdown | None:
    """Why a report on a recorded run has no comparison of batches; None for the others."""
    if not p.recorded:
        return None
    from IPython.display import Markdown

    return Markdown(
        "*The comparison of ways to batch is left out: it would deploy and load four more servers, "
        "and this report is on a run that was recorded.*"
    )


def marks(run: Run) -> Markdown | None:
    """What people noted while the run was recorded, with its second; None when they did not."""
    from IPython.display import Markdown

    rows = run.changes[run.changes["knob"] == "mark"].sort_values("asked_s")
    if not len(rows):
        return None
    lines = [f"- {m['asked_s']:.1f} s: {html.escape(m['to'])}" for m in measures.records(rows)]
    return Markdown("\n".join(["## Marks", "", *lines]))


def write_summary(run: Run, place: Path | None = None) -> dict[str, Any]:
    """Write the run's `summary.json` into `place`, by default beside its tables; return it."""
    found = summary.of(run)
    ((place or run.folder) / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def point_latest(place: Path) -> None:
    """Let `latest` beside a report's folder lead to it."""
    link = place.parent / "latest"
    part = place.parent / f".latest-{place.name}"
    part.unlink(missing_ok=True)
    part.symlink_to(place.name)
    part.replace(link)


def of(run_folder: Path, progress: bool = True) -> Path:
    """Report on a recorded run, in a process of its own; returns the path of its report.html.

    Takes some seconds and starts no server, so it may be called from any thread, and while the run
    lasts. The report goes to a new folder in `reports/`; the run's folder is only read.

    Raises:
        ReportError: when no run is there, or the report fails; with the last lines of what it said.
    """
    run_folder = Path(run_folder).resolve()
    place = folder(Parameters(recorded=str(run_folder))).resolve()
    command = [sys.executable, "-m", "kit.report"]
    for name, value in (("recorded", run_folder), ("folder", place)):
        command += ["-p", name, str(value)]
    with waiting("making the report") if progress else contextlib.nullcontext():
        done = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
        )  # fmt: skip
    if done.returncode:
        last = "\n".join(deque(done.stdout.strip().splitlines(), 8))
        raise ReportError(f"the report on {run_folder} failed:\n{last}")
    return place / "report.html"


def main(argv: list[str] | None = None) -> int:
    """Run the report; 0 when every cell ran, 2 for wrong parameters, else 1 (130 for Ctrl-C)."""
    parser = argparse.ArgumentParser("python -m kit.report", description="Run the report notebook.")
    parser.add_argument(
        "-p", action="append", nargs=2, default=[], metavar=("NAME", "VALUE"), dest="parameters",
        help="set a parameter of the notebook; repeatable",
    )  # fmt: skip
    asked = parser.parse_args(argv).parameters
    try:
        parameters = Parameters(**{name: literal(value) for name, value in asked})
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    place = folder(parameters).resolve()
    place.mkdir(parents=True, exist_ok=True)
    code = _execute(parameters, place)
    with contextlib.suppress(
        store.StoreError
    ):  # also of a recorded run, whose tables lie elsewhere
        store.settle(place)
        run = store.load(place)
        if code == 0 and run.status != "complete":
            print(f"report: the run is {run.status}: {'; '.join(run.notes)}", file=sys.stderr)
            code = 1
    _export(place)
    point_latest(place)
    print(f"report: {place / 'report.html'}")
    return code


def _execute(parameters: Parameters, place: Path) -> int:
    import nbformat
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    given = parameters.model_dump(exclude_defaults=True) | {"folder": str(place)}
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if parameters.recorded:
        given["recorded"] = str(Path(parameters.recorded).resolve())
        notebook.cells = [
            c for c in notebook.cells if EXPERIMENT_TAG not in c.metadata.get("tags", [])
        ]
    try:
        papermill.execute_notebook(
            notebook, place / "report.ipynb", given, cwd=ROOT, kernel_name="python3",
            progress_bar=False, stderr_file=sys.stderr,
        )  # fmt: skip
    except PapermillExecutionError as error:
        print(f"report: a cell failed: {error.ename}: {error.evalue}", file=sys.stderr)
        return 1
    except DeadKernelError:
        print("report: the kernel died; what it had measured is kept", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("report: interrupted; what was measured is kept", file=sys.stderr)
        return 130
    return 0


def _export(place: Path) -> None:
    """report.ipynb → report.html, without code and without progress bars."""
    import nbformat
    from nbconvert import HTMLExporter

    path = place / "report.ipynb"
    if not path.exists():
        return
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [o for o in cell.outputs if o.get("name") != "stderr"]
    text, _ = HTMLExporter(
        exclude_input=True, exclude_output_prompt=True, exclude_input_prompt=True
    ).from_notebook_node(notebook)
    (place / "report.html").write_text(text)


if __name__ == "__main__":
    sys.exit(main())
