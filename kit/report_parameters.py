"""What the report can be asked for, and the experiments that it asks for in turn."""

from __future__ import annotations

import difflib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from kit.experiment import Change, Experiment, Slo
from kit.presets import PRESETS
from kit.settings import Settings, SettingsError
from kit.workload import Workload, WorkloadError

WITH_RECORDED = ("recorded", "folder")
"""Parameters that a report on a recorded run takes; the run has everything else."""


class ReportError(ValueError):
    """Parameters that the report does not take, or a report that failed; the text says which."""


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
    recorded: str = ""

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
            if self.recorded:
                self._reports_on_recorded(set(values))
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

    def _reports_on_recorded(self, given: set[str]) -> None:
        ignored = [name for name in type(self).model_fields if name in given]
        ignored = [name for name in ignored if name not in WITH_RECORDED]
        if ignored:
            raise ReportError(
                f"{', '.join(ignored)}: not with recorded = {self.recorded!r}, whose run is over "
                f"and has its own; beside recorded there is only {WITH_RECORDED[1]!r}"
            )
        run = Path(self.recorded)
        if not (run / "run.json").is_file():
            raise ReportError(
                f"recorded = {self.recorded!r}: no run is there; give the folder that holds run.json"
            )
        if self.folder and Path(self.folder).resolve() == run.resolve():
            raise ReportError(
                f"folder = {self.folder!r} is the recorded run's own: leave it empty or name another"
            )


def read_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """The parameters as a notebook's globals hold them, right after its `parameters` cell.

    papermill only warns of names that the notebook does not know; here they are an error. Values
    as in that cell count as not given.
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
            and not _is_default(name, value)
        }
    )


def _is_default(name: str, value: Any) -> bool:
    field = Parameters.model_fields.get(name)
    return field is not None and type(value) is type(field.default) and value == field.default


def settings(p: Parameters) -> Settings:
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
        settings=settings(p),
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
    base = settings(p)
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
