"""GPU readings from a driver of known make: right rows, gaps where there is nothing, never a zero."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pynvml
import pytest
from fakes import fake_run
from test_live import accelerator as drawn_accelerator

from kit import accelerator, agreement, gpu, provenance, stretch
from kit.cuda_visible import uncertain, visible
from kit.sampler import Sampler, read_samples
from kit.settings import Settings
from kit.store import Run, environment

WHOLE, CUT = "GPU-aa11", "GPU-ab22"
PARTS = ["MIG-0c", "MIG-0d"]
GIB = 2**30


def error(code: int) -> pynvml.NVMLError:
    return pynvml.NVMLError(code)


class Nvml:
    """Two GPUs: the first without power and energy, the second cut in two by MIG."""

    def __init__(self) -> None:
        self.alive, self.initialised = True, 0
        self.lost: set[str] = set()
        self.absent = {WHOLE: {"PowerUsage", "TotalEnergyConsumption"}}
        self.absent[CUT] = {"UtilizationRates", "Samples", "TotalEnergyConsumption"}
        everything_else = {"PowerUsage", "Temperature", "ClockInfo", "CurrentClocksThrottleReasons"}
        for part in PARTS:
            self.absent[part] = self.absent[CUT] | everything_else
        self.samples = [
            (0, 3_000_000_000),
            (100, 50),
            (200, 50),
        ]  # (µs, %); one place never written
        self.names = {WHOLE: "NVIDIA H200", CUT: "NVIDIA H200"}
        self.names |= dict.fromkeys(PARTS, "NVIDIA H200 MIG 3g.71gb")

    def asked(self, h: str, what: str) -> None:
        if h in self.lost:
            raise error(pynvml.NVML_ERROR_GPU_IS_LOST)
        if what in self.absent[h]:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlInit(self) -> None:
        if not self.alive:
            raise error(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        self.initialised += 1

    def nvmlShutdown(self) -> None:
        pass

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, i: int) -> str:
        self.asked([WHOLE, CUT][i], "")
        return [WHOLE, CUT][i]

    def nvmlDeviceGetUUID(self, h: str) -> str:
        return h

    def nvmlDeviceGetName(self, h: str) -> str:
        return self.names[h]

    def nvmlDeviceGetMigMode(self, h: str) -> list[int]:
        if h == WHOLE:
            raise error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, h: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, h: str, i: int) -> str:
        if i >= len(PARTS):
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        return PARTS[i]

    def nvmlDeviceGetUtilizationRates(self, h: str) -> Any:
        self.asked(h, "UtilizationRates")
        return types.SimpleNamespace(gpu=80, memory=30)

    def nvmlDeviceGetMemoryInfo(self, h: str, version: int | None = None) -> Any:
        self.asked(h, "MemoryInfo")
        if version:  # a driver older than the binding
            raise error(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        total = (70 if h in PARTS else 140) * GIB
        return types.SimpleNamespace(used=GIB, total=total)

    def nvmlDeviceGetPowerUsage(self, h: str) -> int:
        self.asked(h, "PowerUsage")
        return 321_000

    def nvmlDeviceGetTotalEnergyConsumption(self, h: str) -> int:
        self.asked(h, "TotalEnergyConsumption")
        return 123_456_789_012

    def nvmlDeviceGetTemperature(self, h: str, sensor: int) -> int:
        self.asked(h, "Temperature")
        return 55

    def nvmlDeviceGetClockInfo(self, h: str, clock: int) -> int:
        self.asked(h, "ClockInfo")
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, h: str) -> int:
        self.asked(h, "CurrentClocksThrottleReasons")
        return 4

    def nvmlDeviceGetSamples(self, h: str, kind: int, since_us: int) -> Any:
        self.asked(h, "Samples")
        if not self.samples:  # as of a GPU that idles
            raise error(pynvml.NVML_ERROR_NOT_FOUND)
        value = types.SimpleNamespace
        return pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, [
            value(timeStamp=t, sampleValue=value(uiVal=v)) for t, v in self.samples
        ]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    fake = Nvml()
    monkeypatch.setattr(gpu, "pynvml", fake)
    for name, value in {"_known": [], "_failed": False, "_failure": "", "RETRY_S": -1.0}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "_asked_s", -math.inf)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return fake


def test_what_is_not_supported_has_no_reading_and_is_named(nvml: Nvml) -> None:
    rows = gpu.readings()
    assert rows[WHOLE] == {
        "sm_percent": 80, "memory_bandwidth_percent": 30, "memory_used_bytes": GIB,
        "memory_total_bytes": 140 * GIB, "temperature_c": 55, "sm_clock_mhz": 1980,
        "throttle_reasons": 4,
    }  # fmt: skip
    assert rows[CUT]["power_w"] == 321
    assert "sm_percent" not in rows[CUT]
    for part in PARTS:
        assert rows[part] == {"memory_used_bytes": GIB, "memory_total_bytes": 70 * GIB}
    named = {d.uuid: d for d in gpu.devices()}
    assert list(named) == [WHOLE, CUT, *PARTS]
    assert named[WHOLE].unsupported == ("power_w", "energy_j")
    assert named[CUT].unsupported == ("sm_percent", "memory_bandwidth_percent", "energy_j")
    assert [named[u].mig for u in named] == [None, "enabled", "instance", "instance"]
    assert {named[p].instance_of for p in PARTS} == {CUT}
    assert named[WHOLE].label == "NVIDIA H200 (140 GiB)"
    for uuid, device in named.items():
        assert not set(device.unsupported) & set(rows[uuid])


def test_the_energy_counter_reaches_the_file_to_the_joule(nvml: Nvml, tmp_path: Path) -> None:
    nvml.absent[WHOLE] = set()
    assert read_samples(sampled(tmp_path)).query("metric == 'energy_j'")["value"].tolist() == [
        123456789
    ]


def test_the_drivers_own_samples_since_the_last_call(nvml: Nvml) -> None:
    mine: dict[str, int] = {}
    assert gpu.driver_percent(mine) == {}  # the first call begins: what was before is not of it
    nvml.samples += [(300, 70), (400, 90)]
    assert gpu.driver_percent(mine) == {WHOLE: 80.0}
    assert gpu.driver_percent(mine) == {}
    nvml.samples = []
    assert "driver_sm_percent" not in gpu.readings(mine)[WHOLE]
    nvml.samples = [(400, 90), (500, 10)]
    others: dict[str, int] = {}
    gpu.readings(others)  # someone else's window takes nothing from this one
    assert gpu.readings(mine)[WHOLE]["driver_sm_percent"] == 10
    assert CUT not in mine or mine[CUT] == 0


GPUS: list[tuple[str, list[str] | None]] = [(WHOLE, None), (CUT, PARTS)]


@pytest.mark.parametrize(
    ("entries", "seen"),
    [
        (None, [WHOLE, *PARTS]),
        ("", []),
        ("1", PARTS),
        ("1,0", [*PARTS, WHOLE]),
        (CUT, PARTS),
        ("GPU-ab", PARTS),
        ("GPU-a", []),  # the beginning of more than one
        ("MIG-0d", ["MIG-0d"]),
        ("MIG-0d,MIG-0c", ["MIG-0d", "MIG-0c"]),
        ("MIG-0", []),
        ("MIG-0d,0", ["MIG-0d"]),
        ("NoDevFiles", []),
    ],
)
def test_visible_devices_and_parts_of_them(entries: str | None, seen: list[str]) -> None:
    assert visible(entries, GPUS) == seen
    assert visible(entries, [("GPU-empty", []), *GPUS][1:]) == seen
    assert visible(None, [("GPU-empty", [])]) == []  # MIG is on and nobody cut an instance


@pytest.mark.parametrize(
    "entries",
    ["", "0", "1", "2,0", "0,7,1", "-1", "0,-1,1", "0,0", "0,1,0", " 0 , 2", "1gpu,2x", "+1", "0,,1", "x",
     "GPU-aa,GPU-c", "GPU-c3,GPU-ab2", "GPU-aa11,GPU-aa", "GPU-aa,1", "1,GPU-aa", "GPU-zz,GPU-aa",
     "GPU-a"],
)  # fmt: skip
def test_visible_whole_gpus_are_those_that_torch_finds(
    entries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch import cuda

    uuids = ["GPU-aa11", "GPU-ab22", "GPU-c3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", entries)
    found = cuda._parse_visible_devices()
    if found and isinstance(found[0], str):
        found = cuda._transform_uuid_to_ordinals(found, uuids)
    known: list[str] = []
    for i in found:
        if i >= len(uuids):  # torch counts on; CUDA stops, by its documentation
            break
        known.append(uuids[i])
    assert visible(entries, [(uuid, None) for uuid in uuids]) == known


def test_counting_is_doubted_where_gpus_differ() -> None:
    counted, named = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "GPU-aa"}
    assert "name UUIDs instead, or set CUDA_DEVICE_ORDER" in uncertain(counted, ["L4", "H100"])
    assert uncertain(counted, ["H100", "H100"]) == uncertain(named, ["L4", "H100"]) == ""
    assert uncertain(counted | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["L4", "H100"]) == ""


def test_only_visible_devices_are_read(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", PARTS[1])
    assert set(gpu.readings()) == {CUT, PARTS[1]}
    assert {d.uuid for d in gpu.devices() if d.visible} == {CUT, PARTS[1]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu.readings() == {}
    assert not any(d.visible for d in gpu.devices())
    assert gpu.why_none() == "no GPU readings: of 2 GPUs CUDA_VISIBLE_DEVICES = '' shows none"


def test_no_driver_is_a_gap_with_a_reason(nvml: Nvml) -> None:
    nvml.alive = False
    assert gpu.readings({}) == {}
    assert gpu.devices() == []
    assert gpu.why_none() == "no GPU readings: NVIDIA's driver does not answer (Driver Not Loaded)"
    here = environment()
    assert (here["gpus"], here["gpu_driver"], here["gpu_note"]) == ([], "", gpu.why_none())
    nvml.alive = True
    assert gpu.why_none() == ""


def test_the_driver_is_begun_with_once_and_anew_after_a_failure(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(5):
        gpu.readings()
    assert nvml.initialised == 1
    monkeypatch.setattr(gpu, "RETRY_S", 60.0)
    nvml.lost = {WHOLE}
    for _ in range(5):
        assert set(gpu.readings()) == {CUT, *PARTS}  # a gap, not a zero; others go on
    assert nvml.initialised == 1  # not at every reading
    monkeypatch.setattr(gpu, "RETRY_S", -1.0)
    assert set(gpu.readings()) == {CUT, *PARTS}
    assert next(d.name for d in gpu.devices()) == "a GPU that does not answer"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # the lost one still counts
    assert set(gpu.readings()) == {CUT, *PARTS}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    nvml.lost = set()
    assert set(gpu.readings()) == {WHOLE, CUT, *PARTS}
    before = nvml.initialised
    gpu.readings()
    assert nvml.initialised == before


def ran_on(**more: Any) -> Run:
    return replace(fake_run(), environment={"cpus": 2} | more)


def test_comparable_hardware_is_a_model_and_not_a_card(nvml: Nvml) -> None:
    here = environment()
    assert here["gpus"] == ["NVIDIA H200 (140 GiB)", *["NVIDIA H200 MIG 3g.71gb (70 GiB)"] * 2]
    assert here["gpu_uuids"] == [WHOLE, CUT, *PARTS]
    assert here["gpu_driver"] == "570.86.15"
    assert here["gpu_unsupported"][WHOLE] == ["power_w", "energy_j"]
    assert json.loads(json.dumps(here)) == here
    h200, h100 = "NVIDIA H200 (140 GiB)", "NVIDIA H100 80GB HBM3 (80 GiB)"
    mine, twin, other = (
        ran_on(gpus=[label], gpu_uuids=[uuid])
        for label, uuid in ((h200, "GPU-1"), (h200, "GPU-2"), (h100, "GPU-3"))
    )
    old, older = ran_on(gpus=["GPU-1"]), ran_on(gpus=["GPU-9"])

    def differ(a: Run, b: Run) -> bool:
        texts = [stretch.obstacles(stretch.whole(x), stretch.whole(y)) for x, y in ((a, b), (b, a))]
        assert bool(texts[0]) == bool(texts[1])
        return any("gpus" in t for t in texts[0])

    assert not differ(mine, twin)
    assert differ(mine, other)
    assert not differ(old, mine)
    assert differ(older, mine)
    assert not differ(old, ran_on(gpus=["GPU-1"]))
    assert differ(old, older)


@pytest.mark.parametrize(
    ("gpus", "text"),
    [(["A (80 GiB)"] * 2, "2 × A (80 GiB)"), (["A (8 GiB)"], "A (8 GiB)"), (["GPU-1"], "1 GPU"),
     ([], "CPU")],
)  # fmt: skip
def test_figures_name_the_gpus(gpus: list[str], text: str) -> None:
    run = ran_on(gpus=gpus)
    run.experiment["settings"] |= {"engine": "torch", "num_gpus": 1.0, "model": "resnet50"}
    assert provenance.accelerator_note(run).endswith(f" · {text}")


def sampled(folder: Path) -> Path:
    """What a sampler writes in two readings of a cluster that does not answer."""

    class Silent:
        def status(self) -> None:
            raise RuntimeError("no cluster")

        def replicas(self) -> list[dict[str, Any]]:
            return []

    path, load = folder / "samples.csv", {"t_s": 0.0, "in_flight": 0}
    sampler = Sampler(Silent(), lambda: load, path)  # type: ignore[arg-type]
    path.write_text("time_s,source,metric,value\n")
    sampler._stop = types.SimpleNamespace(  # type: ignore[assignment]
        is_set=iter([False, True]).__next__, wait=lambda s: None
    )
    sampler._sample()
    return path


def test_samples_of_a_run_hold_what_is_supported(nvml: Nvml, tmp_path: Path) -> None:
    rows = read_samples(sampled(tmp_path))
    cards = rows[rows["source"].str.startswith("gpu:")]
    assert set(cards["source"]) == {f"gpu:{uuid}" for uuid in (WHOLE, CUT, *PARTS)}
    assert cards.loc[cards["metric"] == "power_w", "source"].tolist() == [f"gpu:{CUT}"]
    assert cards.loc[cards["metric"] == "sm_percent", "source"].tolist() == [f"gpu:{WHOLE}"]
    assert "energy_j" not in set(cards["metric"])
    assert (cards["value"] > 0).all()


def polled(**metrics: Any) -> list[agreement.Agreement]:
    times = np.arange(0, 60, 0.5)
    table = pd.DataFrame({"time_s": times} | metrics).melt("time_s", var_name="metric")
    samples = table.dropna().assign(source=f"gpu:{WHOLE}")
    return agreement._gpus(replace(fake_run(), samples=samples))


def test_readings_agree_with_what_the_driver_counted() -> None:
    times = np.arange(0, 60, 0.5)
    busy = np.where(times < 30, 90.0, 0.0)
    own = np.where(times < 30, 88.0, np.nan)  # idle: no samples
    (check,) = polled(sm_percent=busy, driver_sm_percent=own)
    assert (check.ours, check.theirs, check.agrees) == ("90.0 %", "88.0 %", True)
    assert not polled(sm_percent=busy, driver_sm_percent=own - 20)[0].agrees
    (power,) = polled(power_w=np.full(120, 300.0), energy_j=5e8 + 310 * times)
    assert (power.ours, power.theirs, power.agrees) == ("300.0 W", "310.0 W", True)
    assert not polled(power_w=np.full(120, 300.0), energy_j=400 * times)[0].agrees
    assert polled(power_w=np.full(120, 300.0), energy_j=np.full(120, 7.0))[0].agrees is None


def test_a_figure_says_that_utilisation_is_not_supported() -> None:
    settings = Settings(engine="vllm", model="/models/m", num_gpus=1.0)
    rows = [(f"gpu:{CUT}", "memory_used_bytes", 4e10), (f"gpu:{CUT}", "memory_total_bytes", 8e10)]
    _, words = drawn_accelerator(settings, rows)
    assert words == ["GPU", "SM: not supported", "memory used"]


SCRIPT = Path(__file__).parent / "gpu" / "check_gpu.py"


@pytest.fixture
def beside(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the check for a GPU machine is made of."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import curves
    import models
    import readings

    return types.SimpleNamespace(curves=curves, models=models, readings=readings)


def test_the_models_that_are_measured_are_what_they_are_called(beside: Any) -> None:
    import torch

    c = beside.models
    assert sum(p.numel() for p in c.resnet50().parameters()) == 25_557_032
    known = json.loads((accelerator.DATA / "accelerators.json").read_text())["profiles"]
    h100 = known["h100.llama-3.1-8b.bf16"]
    assert h100["weight_bytes"] == c.LAYERS * c.LAYER_BYTES + 2 * c.HEAD_BYTES
    assert h100["kv_bytes_per_token"] == c.KV_BYTES
    torch.manual_seed(0)
    model = c.Llama(1, 4, "cpu", torch.float32)
    x = model.tokens(20)
    # A step over a cache of all tokens before gives what a prefill of all of them gives.
    qkv = torch.nn.functional.rms_norm(x, (model.hidden,)) @ model.weights[0][0]
    _, *kv = qkv.split(model.widths, dim=-1)
    cache = [t.view(1, 20, model.kv, c.HEAD).transpose(1, 2).clone() for t in kv]
    for t in cache:
        t[:, :, -1] = 0  # the step's own to write
    assert model.decode(x[-1:], [cache]) == model.prefill(x)


def test_fits_find_what_made_the_times(beside: Any) -> None:
    c = beside.curves
    n = [1.0, 8, 32, 128, 1, 8, 32, 128]
    k = [128.0, 1024, 4096, 16384, 4096, 32768, 131072, 524288]
    times = [5e-3 + 1e-5 * a + 3e-8 * b for a, b in zip(n, k, strict=True)]
    assert c.fit([[1.0] * 8, n, k], times) == pytest.approx([5e-3, 1e-5, 3e-8], rel=1e-6)
    falling = [5e-3 - 1e-6 * a + 3e-8 * b for a, b in zip(n, k, strict=True)]
    d, e, f = c.fit([[1.0] * 8, n, k], falling)
    assert e == 0
    assert (d, f) == (pytest.approx(5e-3, rel=0.05), pytest.approx(3e-8, rel=0.05))
    assert c.above_floor([1, 2, 4, 8], [1.0, 1.1, 2.0, 4.0], 2) == [2, 3]
    assert c.above_floor([1, 2, 4], [1.0, 1.1, 1.1], 2) == [1, 2]


def test_a_wrong_reading_fails_its_check(beside: Any) -> None:
    r = beside.readings

    class Wrong(r.Pretended):  # type: ignore[misc,name-defined]
        def readings(self, seen: dict[str, int] | None = None) -> dict[str, dict[str, float]]:
            ((uuid, told),) = super().readings(seen).items()
            told |= {"sm_percent": told["sm_percent"] / 3, "memory_used_bytes": 1e9}
            del told["energy_j"]
            return {uuid: told}

    load = r.Load("cpu")
    try:
        found = {x.what: x.ok for x in r.check_readings(Wrong(load), load, "GPU-none", tiny=True)}
    finally:
        load.end()
    assert [what for what, ok in found.items() if ok is None] == [
        "power is what the energy counter counts"
    ]
    assert [what for what, ok in found.items() if ok is False] == [
        "memory grows by what torch takes",
        "SM utilisation under full load > 50 %",
        "polled utilisation is what torch was busy",
        "polling agrees with the driver's samples",
    ]


def test_what_cuda_shows_is_held_against_what_is_read(
    beside: Any, nvml: Nvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.nvmlDeviceGetMigMode = lambda h: [0, 0]  # type: ignore[method-assign]
    cuda = """
import os
from kit.cuda_visible import visible
for u in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), [("GPU-aa11", None), ("GPU-ab22", None)]):
    print(u[4:])
"""
    monkeypatch.setattr(beside.readings, "CUDA", cuda)
    monkeypatch.setenv("PYTHONPATH", str(SCRIPT.parents[2]))
    found = beside.readings.check_visibility(gpu)
    assert all(x.ok for x in found)
    assert {x.text for x in found} >= {f"CUDA sees {n}, kit.gpu {n}" for n in (0, 1, 2)}
    monkeypatch.setattr(beside.readings, "CUDA", "print('aa11')")
    assert {x.ok for x in beside.readings.check_visibility(gpu)} == {True, False}


def test_the_check_for_a_gpu_machine_goes_its_way_and_writes_profiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "accelerators.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BAD" not in done.stdout
    assert done.stdout.count("(pretended)") == done.stdout.count("ok  ") == 8
    monkeypatch.setattr(accelerator, "DATA", tmp_path)
    accelerator._data.cache_clear()
    try:
        (llm,), (vision,) = accelerator.profile_names(), accelerator.vision_names()
        assert accelerator.profile(llm).static_batch_s([100], [20]) > 0
        assert accelerator.vision_profile(vision).batch_s(4) > 0
        for name in (llm, vision):
            assert "NOT an accelerator's" in accelerator.any_profile(name).evidence
            assert "no GPU" in accelerator.any_profile(name).label
        raw = json.loads(out.read_text())["profiles"]
        assert "torch 2" in raw[llm]["evidence"]
        assert raw[llm]["kv_capacity_tokens"] > 0
    finally:
        accelerator._data.cache_clear()


def test_the_check_says_when_there_is_no_gpu(tmp_path: Path) -> None:
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "none.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 2
    assert "torch sees no GPU. no GPU readings: " in done.stderr
    assert not (tmp_path / "none.json").exists()
