"""GPU readings from a driver of known make: right rows, gaps where there is nothing, never a zero."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kit import accelerator, agreement, gpu
from kit.sampler import Sampler, read_samples
from kit.store import environment


class NotSupported(Exception):
    pass


class Nvml:
    """Two GPUs: the first without power and energy, the second cut in two by MIG."""

    NVMLError = NotSupported
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = NVML_GPU_UTILIZATION_SAMPLES = 0

    def __init__(self) -> None:
        self.alive = True
        self.samples_us = 1_000_000

    def nvmlInit(self) -> None:
        if not self.alive:
            raise NotSupported("Driver Not Loaded")

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> str:
        return f"GPU-{'ab'[i]}1"

    def nvmlDeviceGetUUID(self, h: str) -> str:
        return h

    def nvmlDeviceGetName(self, h: str) -> bytes:
        return b"NVIDIA H200" if "MIG" not in h else b"NVIDIA H200 MIG 3g.71gb"

    def nvmlDeviceGetMigMode(self, h: str) -> list[int]:
        if h == "GPU-a1":
            raise NotSupported("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, h: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, h: str, i: int) -> str:
        if i > 1:
            raise NotSupported("Not Found")
        return f"MIG-{i}"

    def nvmlDeviceGetUtilizationRates(self, h: str) -> Any:
        if h != "GPU-a1":
            raise NotSupported("Not Supported")
        return types.SimpleNamespace(gpu=80, memory=30)

    def nvmlDeviceGetMemoryInfo(self, h: str) -> Any:
        total = 70 if "MIG" in h else 140
        return types.SimpleNamespace(used=2**30, total=total * 2**30)

    def nvmlDeviceGetPowerUsage(self, h: str) -> int:
        if h != "GPU-b1":
            raise NotSupported("Not Supported")
        return 321_000

    def nvmlDeviceGetTotalEnergyConsumption(self, h: str) -> int:
        raise NotSupported("Not Supported")

    def nvmlDeviceGetTemperature(self, h: str, sensor: int) -> int:
        return 55

    def nvmlDeviceGetClockInfo(self, h: str, clock: int) -> int:
        return 1980

    def nvmlDeviceGetSamples(self, h: str, kind: int, since: int) -> Any:
        if h != "GPU-a1":
            raise NotSupported("Not Supported")
        self.samples_us += 400_000
        times = [self.samples_us - 200_000, self.samples_us]
        values = (types.SimpleNamespace(uiVal=v) for v in (70, 90))
        return 1, [
            types.SimpleNamespace(timeStamp=t, sampleValue=v)
            for t, v in zip(times, values, strict=True)
        ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setattr(gpu, "pynvml", fake)
    monkeypatch.setattr(gpu, "_reasons", lambda h: 0)
    monkeypatch.setattr(gpu, "_seen_us", {})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_what_is_not_supported_has_no_reading_and_is_named(nvml: Nvml) -> None:
    rows = gpu.readings()
    assert set(rows) == {"GPU-a1", "GPU-b1", "MIG-0", "MIG-1"}
    assert rows["GPU-a1"] == {
        "sm_percent": 80, "memory_bandwidth_percent": 30, "memory_used_bytes": 2**30,
        "memory_total_bytes": 140 * 2**30, "temperature_c": 55, "sm_clock_mhz": 1980,
        "throttle_reasons": 0, "driver_sm_percent": 80,
    }  # fmt: skip
    assert "power_w" not in rows["GPU-a1"]
    assert rows["GPU-b1"]["power_w"] == 321
    assert not {"sm_percent", "driver_sm_percent"} & set(rows["GPU-b1"])
    assert rows["MIG-0"]["memory_total_bytes"] == 70 * 2**30
    named = {d.uuid: d for d in gpu.devices()}
    assert named["GPU-a1"].unsupported == ("power_w", "energy_j")
    assert "sm_percent" in named["MIG-1"].unsupported
    assert named["MIG-1"].instance_of == "GPU-b1"
    assert named["GPU-a1"].label == "NVIDIA H200 (140 GiB)"


@pytest.mark.parametrize(
    ("entries", "seen"),
    [
        (None, ["GPU-a1", "MIG-0", "MIG-1"]),
        ("", []),
        ("0", ["GPU-a1"]),
        ("1", ["MIG-0", "MIG-1"]),
        ("1,0", ["MIG-0", "MIG-1", "GPU-a1"]),
        ("GPU-a1", ["GPU-a1"]),
        ("GPU-a", ["GPU-a1"]),
        ("GPU-", []),  # the beginning of more than one
        ("MIG-1", ["MIG-1"]),
        ("GPU-b1", ["GPU-b1"]),
        ("0,7,1", ["GPU-a1"]),  # what follows an unknown one is hidden
        ("-1", []),
        (" 0 , MIG-0", ["GPU-a1", "MIG-0"]),
    ],
)
def test_visible_devices_are_read_as_cuda_does(entries: str | None, seen: list[str]) -> None:
    assert gpu.visible(entries, [("GPU-a1", []), ("GPU-b1", ["MIG-0", "MIG-1"])]) == seen


def test_only_visible_devices_are_read(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    assert set(gpu.readings()) == {"GPU-b1", "MIG-1"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.readings() == {}
    assert "CUDA_VISIBLE_DEVICES = '' shows none" in gpu.why_none()


def test_no_driver_is_a_gap_with_a_reason(nvml: Nvml) -> None:
    nvml.alive = False
    assert gpu.readings() == {}
    assert gpu.devices() == []
    assert gpu.why_none() == "no GPU readings: NVIDIA's driver does not answer (Driver Not Loaded)"
    assert environment()["gpus"] == []
    nvml.alive = True
    assert gpu.why_none() == ""


def test_comparable_hardware_is_a_model_and_not_a_card(nvml: Nvml) -> None:
    here = environment()
    assert here["gpus"] == ["NVIDIA H200 (140 GiB)"] * 2
    assert here["gpu_uuids"] == ["GPU-a1", "GPU-b1", "MIG-0", "MIG-1"]


def test_samples_of_a_run_hold_what_is_supported(nvml: Nvml, tmp_path: Path) -> None:
    class Silent:
        def status(self) -> None:
            raise RuntimeError("no cluster")

        def replicas(self) -> list[dict[str, Any]]:
            return []

    path = tmp_path / "samples.csv"
    sampler = Sampler(Silent(), lambda: {"t_s": 0.0, "in_flight": 0}, path)  # type: ignore[arg-type]
    rows = pd.DataFrame(sampler._read(), columns=["time_s", "source", "metric", "value"])
    cards = rows[rows["source"].str.startswith("gpu:")]
    assert set(cards["source"]) == {"gpu:GPU-a1", "gpu:GPU-b1", "gpu:MIG-0", "gpu:MIG-1"}
    power = cards[cards["metric"] == "power_w"]
    assert power["source"].tolist() == ["gpu:GPU-b1"]
    path.write_text(rows.to_csv(index=False))
    from dataclasses import replace

    from fakes import fake_run

    run = replace(fake_run(), samples=read_samples(path))
    found = [c for c in agreement.checks(run) if "NVML" in c.what]
    assert [(c.ours, c.theirs, c.agrees) for c in found] == [("80.0 %", "80.0 %", True)]


def test_the_check_for_a_gpu_machine_goes_its_way_and_writes_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "accelerators.json"
    script = Path(__file__).parent / "gpu" / "check_gpu.py"
    command = [sys.executable, str(script), "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(accelerator, "DATA", tmp_path)
    accelerator._data.cache_clear()
    try:
        (llm,), (vision,) = accelerator.profile_names(), accelerator.vision_names()
        assert accelerator.profile(llm).static_batch_s([100], [20]) > 0
        assert accelerator.vision_profile(vision).batch_s(4) > 0
        assert "NOT an accelerator's" in accelerator.profile(llm).evidence
    finally:
        accelerator._data.cache_clear()
    without = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    if "torch sees no GPU" in without.stderr:
        assert without.returncode == 2
