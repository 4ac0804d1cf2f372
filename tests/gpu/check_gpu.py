"""Checks the kit's GPU readings on a real GPU, and measures profiles for the emulated accelerator.

    python tests/gpu/check_gpu.py [--out profiles.json]

Takes under two minutes and needs torch and nvidia-ml-py, nothing else of the kit: `kit/gpu.py` is
loaded by its path. Written are a ResNet-50 and a Llama-3.1-8B decode step in the form of
`data/accelerators.json`, with the evidence. `--device cpu --tiny` goes the same way on a machine without
a GPU; its figures are of no accelerator, and say so. Exit code: 0 all is well, 1 a check failed, 2 there
is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

HERE = Path(__file__).resolve()
HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD, LAYERS, VOCABULARY = (
    4096,
    14336,
    32,
    8,
    128,
    32,
    128_256,
)
"""Llama-3.1-8B."""
KV_BYTES = 2 * 2 * KV_HEADS * HEAD * LAYERS


def load_gpu_module() -> Any:
    spec = importlib.util.spec_from_file_location("kit_gpu", HERE.parents[2] / "kit" / "gpu.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["kit_gpu"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


class Block(nn.Module):
    """A bottleneck of ResNet-50 (He et al. 2015)."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width

        def conv(a: int, b: int, size: int, step: int = 1) -> nn.Sequential:
            pad = size // 2
            return nn.Sequential(nn.Conv2d(a, b, size, step, pad, bias=False), nn.BatchNorm2d(b))

        self.way = nn.Sequential(
            conv(inside, width, 1),
            nn.ReLU(),
            conv(width, width, 3, stride),
            nn.ReLU(),
            conv(width, outside, 1),
        )
        same = inside == outside and stride == 1
        self.beside = nn.Identity() if same else conv(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.way(x) + self.beside(x))


def resnet50() -> nn.Module:
    """25.6 million parameters, random."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                               nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(blocks):
            layers.append(Block(inside, width, stride if k == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class DecodeStep:
    """One decode step of layers of Llama's shape: all their matrices, and attention over a KV cache."""

    def __init__(self, layers: int, scale: int, device: str, dtype: torch.dtype) -> None:
        self.hidden, feed, self.heads, self.kv = (
            v // scale for v in (HIDDEN, FEED_FORWARD, HEADS, KV_HEADS)
        )
        make = {"device": device, "dtype": dtype}
        qkv = (self.heads + 2 * self.kv) * HEAD
        shapes = [
            (self.hidden, qkv),
            (self.heads * HEAD, self.hidden),
            (self.hidden, 2 * feed),
            (feed, self.hidden),
        ]
        self.weights = [[torch.randn(s, **make) * 0.02 for s in shapes] for _ in range(layers)]
        self.device, self.dtype = device, dtype

    def cache(self, sequences: int, context: int) -> list[torch.Tensor]:
        shape = (sequences, self.kv, context, HEAD)
        make = {"device": self.device, "dtype": self.dtype}
        return [torch.randn(shape, **make) * 0.1 for _ in range(2)]

    def __call__(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        for qkv, out, up, down in self.weights:
            q, _, _ = (x @ qkv).split([self.heads * HEAD, self.kv * HEAD, self.kv * HEAD], dim=-1)
            q = q.view(len(x), self.heads, 1, HEAD)
            found = functional.scaled_dot_product_attention(q, *cache, enable_gqa=True)
            x = x + found.reshape(len(x), -1) @ out
            gate, rest = (x @ up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * rest) @ down
        return x


def timed_s(work: Any, device: str, repeats: int) -> float:
    """Median time of `work`, warmed up; on a GPU by its own events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            begun = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun)
    return statistics.median(times)


def check_readings(gpu: Any) -> list[tuple[str, bool, str]]:
    """The kit's readings while a matrix is multiplied, against what must be so."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    devices = {d.uuid: d for d in gpu.devices()}
    found = [("torch's GPU is among the visible", uuid in devices, f"{uuid} in {sorted(devices)}")]
    if uuid not in devices:
        return found
    torch.zeros(1, device="cuda")
    idle = gpu.readings()[uuid]
    block = torch.empty(2**31, dtype=torch.uint8, device="cuda").fill_(1)
    grown = gpu.readings()[uuid]["memory_used_bytes"] - idle["memory_used_bytes"]
    found.append(
        (
            "memory grows by what is allocated",
            abs(grown / 2**31 - 1) < 0.05,
            f"{grown / 2**31:.3f} of it",
        )
    )
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            for _ in range(20):
                a @ a
            torch.cuda.synchronize()

    thread = threading.Thread(target=burn)
    thread.start()
    time.sleep(1.5)
    gpu.readings()
    seen = []
    for _ in range(20):
        time.sleep(0.25)
        seen.append(gpu.readings()[uuid])
    stop.set()
    thread.join()
    del block
    polled = statistics.mean(r["sm_percent"] for r in seen)
    found.append(("SM utilisation under load", polled > 50, f"{polled:.0f} %"))
    own = [r["driver_sm_percent"] for r in seen if "driver_sm_percent" in r]
    if own:
        mean = statistics.mean(own)
        found.append(
            (
                "polling agrees with the driver's samples",
                abs(polled - mean) < 10,
                f"{polled:.0f} and {mean:.0f} %",
            )
        )
    if "power_w" in idle:
        busy = statistics.mean(r["power_w"] for r in seen)
        found.append(
            ("power rises", busy > 1.2 * idle["power_w"], f"{idle['power_w']:.0f} → {busy:.0f} W")
        )
    if "throttle_reasons" in idle:
        why = {w for r in seen for w in gpu.throttling(r["throttle_reasons"])}
        found.append(("throttle reasons can be read", True, ", ".join(why) or "none"))
    found.append(("unsupported fields", True, ", ".join(devices[uuid].unsupported) or "none"))
    return found


def images_profile(device: str, tiny: bool, name: str, evidence: str) -> dict[str, Any]:
    dtype = torch.float16 if device == "cuda" else torch.float32
    model, side = resnet50().eval().to(device, dtype), 32 if tiny else 224
    sizes = [1, 2, 4] if tiny else [1, 2, 4, 8, 16, 32, 64]
    latencies = []
    with torch.inference_mode():
        for n in sizes:
            images = torch.randn(n, 3, side, side, device=device, dtype=dtype)
            latencies.append(
                timed_s(lambda images=images: model(images), device, 3 if tiny else 30)
            )
            print(f"  ResNet-50, batch {n}: {latencies[-1] * 1e3:.2f} ms")
    floor = min(latencies)
    line = [(n, s) for n, s in zip(sizes, latencies, strict=True) if s > 1.2 * floor] or list(
        zip(sizes, latencies, strict=True)
    )
    b, a = np.polyfit(*zip(*line, strict=True), 1) if len(line) > 1 else (0.0, line[0][1])
    fitted = [max(floor, a + b * n) for n in sizes]
    off = 100 * float(np.mean([abs(f / s - 1) for f, s in zip(fitted, latencies, strict=True)]))
    return {
        "accelerator": name, "model": "ResNet-50", "software": f"PyTorch {torch.__version__} {dtype}",
        "kind": "vision",
        "latency": {"floor_s": floor, "a_s": float(a), "b_s_per_image": float(max(b, 0)),
                    "fit_mape_percent": round(off, 2), "points": len(sizes)},
        "measured": {"images": sizes, "latency_s": latencies},
        "evidence": f"{evidence}; random weights, eager; a line through {len(line)} of {len(sizes)} "
        "batches, "
                    f"{off:.1f} % off on average",
    }  # fmt: skip


def decode_profile(device: str, tiny: bool, name: str, evidence: str) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layers, scale = (1, 8) if tiny else (LAYERS, 1)
    step = DecodeStep(layers, scale, device, dtype)
    head = torch.randn(step.hidden, VOCABULARY // (64 if tiny else 1), device=device, dtype=dtype)
    rows = []
    with torch.inference_mode():
        for n in (1, 4) if tiny else (1, 8, 32, 64, 128):
            for context in (16, 64) if tiny else (128, 1024, 4096):
                cache, x = (
                    step.cache(n, context),
                    torch.randn(n, step.hidden, device=device, dtype=dtype),
                )
                took_s = timed_s(
                    lambda x=x, cache=cache: step(x, cache) @ head, device, 3 if tiny else 15
                )
                rows.append((n, n * context, took_s))
                print(f"  decode step, {n} sequences of {context} tokens: {took_s * 1e3:.2f} ms")
                del cache
    table = np.array(rows)
    # Small steps count as much as long ones: the fit is of relative errors.
    design = np.column_stack([np.ones(len(table)), table[:, 0], table[:, 1]]) / table[:, 2:]
    coefficients = np.maximum(np.linalg.lstsq(design, np.ones(len(table)), rcond=None)[0], 0)
    off = 100 * float(np.mean(np.abs(design @ coefficients - 1)))
    d, e, f = (float(c) for c in coefficients)
    return {
        "accelerator": name, "model": "Llama-3.1-8B", "weights": str(dtype).removeprefix("torch."),
        "tensor_parallel": 1, "kind": "llm",
        "decode": {"d_s": d, "e_s_per_sequence": e, "f_s_per_context_token": f,
                   "fit_mape_percent": round(off, 2), "points": len(rows)},
        # Not measured: a prompt's tokens go through the same matrices, in at least one decode's time.
        "prefill": {"floor_s": d, "a_s": d, "b_s_per_token": e, "c_s_per_token2": 0.0},
        "host_overhead_s_per_step": 0.0, "kv_bytes_per_token": KV_BYTES, "kv_capacity_tokens": 450_000,
        "measured": {"sequences": [r[0] for r in rows], "context_tokens": [r[1] for r in rows],
                     "step_s": [r[2] for r in rows]},
        "evidence": f"{evidence}; decode: {layers} layers of {LAYERS} in eager torch, one KV cache "
        "that all of "
                    f"them read, random weights, {off:.1f} % off on average; prefill is not measured",
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check GPU readings and measure profiles.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that mean nothing, to try the way"
    )
    parser.add_argument("--out", type=Path, default=Path("profiles.json"))
    asked = parser.parse_args(argv)
    gpu = load_gpu_module()
    if asked.device == "cuda" and not torch.cuda.is_available():
        print(f"check_gpu: torch sees no GPU. {gpu.why_none()}", file=sys.stderr)
        return 2
    begun_s = time.monotonic()
    name = torch.cuda.get_device_name(0) if asked.device == "cuda" else "no GPU (a CPU)"
    today = datetime.date.today().isoformat()
    evidence = f"measured on {name} on {today} by tests/gpu/check_gpu.py, torch {torch.__version__}"
    if asked.device == "cpu" or asked.tiny:
        evidence = f"NOT an accelerator's: tried out with sizes that mean nothing; {evidence}"
    checks = check_readings(gpu) if asked.device == "cuda" else []
    for what, ok, text in checks:
        print(f"{'ok ' if ok else 'BAD'} {what}: {text}")
    slug = "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")
    profiles = {
        f"{slug}.llama-3.1-8b.measured": decode_profile(asked.device, asked.tiny, name, evidence),
        f"resnet50.{slug}": images_profile(asked.device, asked.tiny, name, evidence),
    }
    asked.out.write_text(json.dumps({"profiles": profiles}, indent=1) + "\n")
    print(f"written: {asked.out}; {time.monotonic() - begun_s:.0f} s")
    return 0 if all(ok for _, ok, _ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
