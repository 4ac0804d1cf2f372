"""What the report can be asked for, and the experiments that it asks for in turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.experiment import Change, Experiment, Slo
from kit.parameters import Asked, ReportError, read
from kit.presets import PRESETS
from kit.settings import Settings
from kit.workload import Workload

WITH_RECORDED = ("recorded", "folder")
"""Parameters that a report on a recorded run takes; the run has everything else."""


class Parameters(Asked):
    """What the report can be asked for. The notebook's `parameters` cell repeats the defaults.

    Raises:
        ReportError: for an unknown name, a wrong type, or values that the knobs do not take.
    """

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

    def check(self, given: set[str]) -> None:
        if self.recorded:
            self._reports_on_recorded(given)
        main_experiment(self)
        comparison(self)

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
    """The parameters as the notebook's globals hold them, see `kit.parameters.read`."""
    return read(namespace, Parameters)


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
