"""The report: its parameters, its experiments, and the command that runs it headless.

`python -m kit.report -p users 64` executes `notebooks/report.ipynb` with papermill and writes a
folder with the HTML, the executed notebook, the run's tables and `summary.json`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kit import measures, store
from kit.experiment import Change, Experiment, Slo
from kit.settings import PRESETS, Settings, SettingsError
from kit.store import Run
from kit.workload import Workload, WorkloadError

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "report.ipynb"


class ReportError(ValueError):
    """Parameters that the report does not take; the text names them and what it does take."""


class Parameters(BaseModel):
    """What the report can be asked for. The notebook's `parameters` cell repeats the defaults.

    Raises:
        ReportError: for an unknown name, a wrong type, or values that the knobs do not take.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    app: str = "batched"
    accelerator: str = "h100.llama-3.1-8b.bf16"
    time_scale: float = 0.15
    lengths: str = "azure-2023-conv"
    users: int = 32
    think_time_s: float = 0.0
    duration_s: float = 90.0
    seed: int = 1
    max_batch_size: int = 4
    batch_wait_timeout_s: float = 0.01
    max_ongoing_requests: int = 64
    later_max_batch_size: int = 16
    later_batch_wait_timeout_s: float = 0.05
    max_replicas: int = 4
    target_ongoing_requests: float = 8.0
    upscale_delay_s: float = 2.0
    look_back_period_s: float = 4.0
    slo_e2e_p95_s: float = 1.5
    slo_queueing_p95_s: float = 0.2
    compare_duration_s: float = 12.0
    port: int = 8000
    folder: str = ""

    def __init__(self, **values: Any) -> None:
        known = type(self).model_fields
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1, 0.0)[0]
                raise ReportError(
                    f"no parameter {name!r}; did you mean {near!r}? There are: {', '.join(known)}"
                )
        try:
            super().__init__(**values)
            main_experiment(self)
            comparison(self)
        except ValidationError as error:
            lines = [
                f"{e['loc'][0]} = {e['input']!r}: {e['msg'][0].lower()}{e['msg'][1:]}"
                for e in error.errors()
            ]
            raise ReportError("\n".join(lines)) from None
        except (SettingsError, WorkloadError) as error:
            raise ReportError(str(error)) from None


def read_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """The parameters as a notebook's globals hold them, right after its `parameters` cell.

    papermill only warns of names that the notebook does not know; here they are an error.
    """
    from IPython import get_ipython  # type: ignore[attr-defined]

    shell = get_ipython()  # type: ignore[no-untyped-call]
    hidden = set(shell.user_ns_hidden) if shell else set()
    return Parameters(
        **{
            name: value
            for name, value in namespace.items()
            if not name.startswith("_")
            and name not in hidden
            and not isinstance(value, types.ModuleType)
        }
    )


def _settings(p: Parameters) -> Settings:
    return Settings(
        app=p.app,
        accelerator=p.accelerator,
        time_scale=p.time_scale,
        max_batch_size=p.max_batch_size,
        batch_wait_timeout_s=p.batch_wait_timeout_s,
        max_ongoing_requests=p.max_ongoing_requests,
        upscale_delay_s=p.upscale_delay_s,
        look_back_period_s=p.look_back_period_s,
    )


def _workload(p: Parameters, duration_s: float) -> Workload:
    return Workload(
        lengths=p.lengths,
        users=p.users,
        think_time_s=p.think_time_s,
        duration_s=duration_s,
        seed=p.seed,
    )


def main_experiment(p: Parameters) -> Experiment:
    """Batches enlarged at 25 %, their wait at 45 %, autoscaling opened at 62 % of the run."""
    first, second, third = (round(p.duration_s * share) for share in (0.25, 0.45, 0.62))
    return Experiment(
        settings=_settings(p),
        workload=_workload(p, p.duration_s),
        timeline=(
            Change(first, "max_batch_size", p.later_max_batch_size),
            Change(second, "batch_wait_timeout_s", p.later_batch_wait_timeout_s),
            Change(third, "num_replicas", "auto"),
            Change(third, "max_replicas", p.max_replicas),
            Change(third, "target_ongoing_requests", p.target_ongoing_requests),
        ),
        slo=Slo(p.slo_e2e_p95_s, p.slo_queueing_p95_s),
        name="main",
    )


def comparison(p: Parameters) -> list[Experiment]:
    """The same load on one replica: chat and throughput presets, unbatched, continuous.

    In this order because only the last two need new replicas.
    """
    base = _settings(p)
    slo = Slo(p.slo_e2e_p95_s, p.slo_queueing_p95_s)
    batched = base.replace(app="batched")
    return [
        Experiment(settings, _workload(p, p.compare_duration_s), slo=slo, name=name)
        for name, settings in {
            "chat": batched.replace(**PRESETS["chat"]),
            "throughput": batched.replace(**PRESETS["throughput"]),
            "unbatched": base.replace(app="unbatched"),
            "continuous": base.replace(app="continuous"),
        }.items()
    ]


def folder(p: Parameters) -> Path:
    """Where this report goes: as asked, or a new folder in `reports/`."""
    return Path(p.folder) if p.folder else ROOT / "reports" / store.new_id("report")


def write_summary(run: Run) -> dict[str, Any]:
    """Write the run's `summary.json` beside its tables, and return it."""
    found = measures.summary(run)
    (run.folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def point_latest(place: Path) -> None:
    """Let `latest` beside a report's folder lead to it."""
    link = place.parent / "latest"
    part = place.parent / f".latest-{place.name}"
    part.unlink(missing_ok=True)
    part.symlink_to(place.name)
    part.replace(link)


def main(argv: list[str] | None = None) -> int:
    """Run the report; 0 when every cell ran, 2 for wrong parameters, else 1 (130 for Ctrl-C)."""
    parser = argparse.ArgumentParser("python -m kit.report", description="Run the report notebook.")
    parser.add_argument(
        "-p", action="append", nargs=2, default=[], metavar=("NAME", "VALUE"), dest="parameters",
        help="set a parameter of the notebook; repeatable",
    )  # fmt: skip
    asked = parser.parse_args(argv).parameters
    try:
        parameters = Parameters(**{name: _literal(value) for name, value in asked})
    except ReportError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    place = folder(parameters).resolve()
    place.mkdir(parents=True, exist_ok=True)
    code = _execute(parameters, place)
    with contextlib.suppress(store.StoreError):
        store.settle(place)
        run = store.load(place)
        if code == 0 and run.status != "complete":
            print(f"report: the run is {run.status}: {'; '.join(run.notes)}", file=sys.stderr)
            code = 1
    _export(place)
    point_latest(place)
    print(f"report: {place / 'report.html'}")
    return code


def _literal(text: str) -> Any:
    """A command line's text as Python reads it: numbers, True, None, lists; else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _execute(parameters: Parameters, place: Path) -> int:
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    given = parameters.model_dump(exclude_defaults=True) | {"folder": str(place)}
    try:
        papermill.execute_notebook(
            NOTEBOOK, place / "report.ipynb", given, cwd=ROOT, kernel_name="python3",
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
    html, _ = HTMLExporter(
        exclude_input=True, exclude_output_prompt=True, exclude_input_prompt=True
    ).from_notebook_node(notebook)
    (place / "report.html").write_text(html)


if __name__ == "__main__":
    sys.exit(main())
