"""What the sweep notebook can be asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from kit import store
from kit.experiment import Slo
from kit.parameters import Asked, ReportError, literal, read
from kit.settings import Settings
from kit.sweep import Sweep, SweepError
from kit.workload import Workload

Grid = Annotated[dict[str, list[Any]], BeforeValidator(literal)]


class Parameters(Asked):
    """The notebook's `parameters` cell repeats the defaults. Raises: see `Asked`."""

    app: str = "batched"
    accelerator: str = "h100.llama-3.1-8b.bf16"
    time_scale: float = 0.1
    lengths: str = "azure-2023-conv"
    arrivals: Literal["users", "poisson", "gamma", "constant"] = "poisson"
    knobs: Grid = {"max_batch_size": [4, 16, 32], "num_replicas": [1, 2]}
    loads: Grid = {"rate_rps": [8.0, 16.0, 24.0]}
    duration_s: float = 30.0
    repeats: int = 1
    seed: int = 1
    slo_e2e_p95_s: float = 1.5
    slo_queueing_p95_s: float | None = None
    port: int = 8000
    folder: str = ""

    def check(self, given: set[str]) -> None:
        try:
            self.sweep()
        except SweepError as error:
            raise ReportError(str(error)) from None

    def sweep(self) -> Sweep:
        """The grid that is asked for."""
        settings = Settings(
            app=self.app, accelerator=self.accelerator, time_scale=self.time_scale,
            max_ongoing_requests=256, max_queued_requests=512,
        )  # fmt: skip
        load = Workload(
            lengths=self.lengths, arrivals=self.arrivals, duration_s=self.duration_s, seed=self.seed
        )
        slo = Slo(self.slo_e2e_p95_s, self.slo_queueing_p95_s)
        return Sweep(settings, load, self.knobs, self.loads, slo, self.repeats)

    def place(self) -> Path:
        """Where the runs go: as asked, which resumes a sweep that is there, or a new folder."""
        return Path(self.folder) if self.folder else store.RUNS / store.new_id("sweep")


def read_parameters(namespace: Mapping[str, Any]) -> Parameters:
    """The parameters as the notebook's globals hold them, see `kit.parameters.read`."""
    return read(namespace, Parameters)
