"""Is what `kit.gpu` reads true: against what torch did meanwhile, against CUDA and the driver."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch

GIB = 2**30
CUDA = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
if cuda.cuInit(0):
    raise SystemExit  # it sees no device
count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
cuda.cuDeviceGetCount(ctypes.byref(count))
for i in range(count.value):
    cuda.cuDeviceGet(ctypes.byref(device), i)
    cuda.cuDeviceGetUuid_v2(uuid, device)
    print(bytes(uuid).hex())
"""
"""What the CUDA driver itself makes of the environment: UUIDs of its devices, one a line."""


@dataclass(frozen=True)
class Check:
    what: str
    ok: bool | None
    """None where the GPU does not support what would be needed."""
    text: str


class Load:
    """A thread that multiplies matrices while it is told to, and knows for how long it was."""

    def __init__(self, device: str) -> None:
        size, dtype = (8192, torch.float16) if device == "cuda" else (64, torch.float32)
        self.device, self.factor = device, torch.randn(size, size, device=device, dtype=dtype)
        self.blocks = [self.factor]
        self._switch, self._busy_s, self._on_s = threading.Lock(), 0.0, 0.0
        self._on, self._over = threading.Event(), False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            if self._on.wait(0.01):
                for _ in range(4):
                    self.factor @ self.factor
                if self.device == "cuda":
                    torch.cuda.synchronize()

    def work(self, on: bool) -> None:
        with self._switch:
            now_s = time.monotonic()
            self._busy_s += now_s - self._on_s if self._on.is_set() else 0.0
            self._on_s = now_s
            (self._on.set if on else self._on.clear)()

    def busy_s(self) -> float:
        """Seconds for which it was told to work, all together."""
        with self._switch:
            return self._busy_s + (time.monotonic() - self._on_s if self._on.is_set() else 0.0)

    def allocate(self, size_bytes: int) -> None:
        self.blocks.append(torch.zeros(size_bytes, dtype=torch.uint8, device=self.device))
        if self.device == "cuda":
            torch.cuda.synchronize()

    def end(self) -> None:
        self._over = True
        self._thread.join()
        self.blocks = [self.factor]


class Pretended:
    """In place of `kit.gpu` on a machine without a GPU: readings as a GPU under this load would tell."""

    def __init__(self, load: Load) -> None:
        self._load, self._energy_j, self._throttled = load, 1e9, 4.0
        self._before = time.monotonic(), load.busy_s()

    def readings(self, seen: dict[str, int] | None = None) -> dict[str, dict[str, float]]:
        now = time.monotonic(), self._load.busy_s()
        width_s, busy_s = (a - b for a, b in zip(now, self._before, strict=True))
        self._before = now
        share = busy_s / max(width_s, 1e-9)
        power_w = 100 + 400 * share
        self._energy_j += power_w * width_s
        used = sum(b.numel() * b.element_size() for b in self._load.blocks)
        own = {} if seen is None else {"driver_sm_percent": 100 * share}
        return {
            "GPU-none": {
                "sm_percent": 100 * share, "memory_used_bytes": used + GIB, "power_w": power_w,
                "energy_j": self._energy_j, "throttle_reasons": self._throttled,
            } | own
        }  # fmt: skip

    def throttling(self, reasons: float) -> tuple[str, ...]:
        return ("power cap",) if int(reasons) & 4 else ()


def check_visibility(gpu: Any) -> list[Check]:
    """What `CUDA_VISIBLE_DEVICES` hides, by `kit.gpu` and by CUDA itself, in every form it may have."""
    cards = [d for d in gpu.devices() if d.instance_of is None]
    parts = {c.uuid: [d.uuid for d in gpu.devices() if d.instance_of == c.uuid] for c in cards}
    gpus = [(c.uuid, parts[c.uuid] if c.mig else None) for c in cards]
    first, cut = cards[0].uuid, any(c.mig for c in cards)
    every = [*parts[first], first]
    forms = [None, "", "0", "-1", f"0,{len(cards)}", "0,0", first, first[:12], "GPU-none", *parts[first],
             ",".join(str(i) for i in reversed(range(len(cards)))), every[0]]  # fmt: skip
    found = []
    for form in dict.fromkeys(forms):
        env = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        env |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env |= {} if form is None else {"CUDA_VISIBLE_DEVICES": form}
        asked = [sys.executable, "-c", CUDA]
        done = subprocess.run(asked, capture_output=True, text=True, check=False, env=env)
        cuda = done.stdout.split()
        ours = [u.split("-", 1)[1].replace("-", "") for u in gpu.visible(form, gpus)]
        # Of all instances CUDA gives a process the first, and no whole GPU beside it.
        same = ours == cuda or (cut and bool(cuda) == bool(ours) and set(cuda) <= set(ours))
        text = f"CUDA sees {len(cuda)}, kit.gpu {len(ours)}"
        found.append(Check(f"CUDA_VISIBLE_DEVICES = {form!r}", same, text))
    return found


def check_readings(gpu: Any, load: Load, uuid: str, tiny: bool) -> list[Check]:
    """Readings of one GPU: idle, with memory taken, under full load, and under load on and off."""

    def read(seen: dict[str, int] | None = None) -> dict[str, float]:
        return dict(gpu.readings(seen)[uuid])

    time.sleep(0.1 if tiny else 2.0)
    idle = read()
    size = GIB // 8 if tiny else 2 * GIB
    load.allocate(size)
    grown = (read().get("memory_used_bytes", 0) - idle.get("memory_used_bytes", 0)) / size
    found = [_check("memory grows by what torch takes", idle, "memory_used_bytes",
                    abs(grown - 1) < 0.05, f"{grown:.3f} of it")]  # fmt: skip

    load.work(True)
    time.sleep(0.1 if tiny else 1.5)  # until power, a mean of the last second, has come up
    full, _ = _poll(read, 0.6 if tiny else 5.0)
    busy, watts = _mean(full, "sm_percent"), _mean(full, "power_w")
    joules, span_s = (full[-1].get(k, 0) - full[0].get(k, 0) for k in ("energy_j", "at_s"))
    counted = joules / span_s
    before = idle.get("power_w", 0)
    words = {w for r in full for w in gpu.throttling(r.get("throttle_reasons", 0))}
    found += [
        _check("SM utilisation under full load > 50 %", idle, "sm_percent", busy > 50, f"{busy:.0f} %"),
        _check("power rises", idle, "power_w", watts > 1.2 * before, f"{before:.0f} → {watts:.0f} W"),
        _check("power is what the energy counter counts", idle, "energy_j",
               abs(counted / watts - 1) < 0.1 if watts else False, f"{watts:.0f} and {counted:.0f} W"),
        _check("throttle reasons can be read", idle, "throttle_reasons", True,
               ", ".join(sorted(words)) or "not throttled"),
    ]  # fmt: skip

    stop, rng = threading.Event(), random.Random(0)

    def on_and_off() -> None:
        on = True
        while not stop.wait(rng.uniform(0.1, 0.6) / (4 if tiny else 1)):
            on = not on
            load.work(on)

    switch = threading.Thread(target=on_and_off)
    switch.start()
    seen: dict[str, int] = {}
    begun_s, busy_s = time.monotonic(), load.busy_s()
    some, cost_s = _poll(lambda: read(seen), 1.0 if tiny else 10.0)
    really = 100 * (load.busy_s() - busy_s) / (time.monotonic() - begun_s)
    stop.set()
    switch.join()
    load.work(False)
    ours = _mean(some, "sm_percent")
    # Both over the same moments: an idle GPU may have no samples.
    both = [r for r in some if "driver_sm_percent" in r]
    polled, own = _mean(both, "sm_percent"), _mean(both, "driver_sm_percent")
    sampled = both[0] if both else {}
    found += [
        _check("polled utilisation is what torch was busy", idle, "sm_percent",
               abs(ours - really) < 15, f"{ours:.0f} and {really:.0f} %"),
        _check("polling agrees with the driver's samples", sampled, "driver_sm_percent",
               abs(polled - own) < 10, f"{polled:.0f} and {own:.0f} %"),
        Check("a reading takes under 0.1 s", cost_s < 0.1, f"{cost_s * 1e3:.1f} ms"),
    ]  # fmt: skip
    return found


def _check(what: str, told: dict[str, float], field: str, ok: bool, text: str) -> Check:
    return Check(what, ok, text) if field in told else Check(what, None, f"no {field} of this GPU")


def _poll(read: Any, duration_s: float) -> tuple[list[dict[str, float]], float]:
    """Readings ten times a second or more, each with its time and what passed since the one before."""
    read()  # where the driver's window and the first span begin
    rows, costs, last_s = [], [], time.monotonic()
    end_s = last_s + duration_s
    while last_s < end_s:
        time.sleep(min(0.1, duration_s / 15))
        asked_s = time.monotonic()
        row = read()
        now_s = time.monotonic()
        costs.append(now_s - asked_s)
        rows.append(row | {"at_s": asked_s, "width_s": asked_s - last_s})
        last_s = asked_s
    return rows, statistics.median(costs)


def _mean(rows: list[dict[str, float]], field: str) -> float:
    """Over time; 0 where nobody told."""
    told = [(r[field], r["width_s"]) for r in rows if field in r]
    return sum(v * w for v, w in told) / max(sum(w for _, w in told), 1e-9)
