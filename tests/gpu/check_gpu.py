"""Checks the kit's GPU readings on a real GPU, and measures profiles for the emulated accelerator.

    python tests/gpu/check_gpu.py [--out profiles.json]

Takes under two minutes and needs torch (2.5 or newer) and nvidia-ml-py, nothing else of the kit:
`kit/gpu.py` is loaded by its path. What is written, ResNet-50 and Llama-3.1-8B, has the form of
`data/accelerators.json` and its evidence with it. `--device cpu --tiny` goes the same way on a machine
without a GPU, with pretended readings; its figures are of no accelerator, and say so.

Exit code: 0 all is well, 1 a check failed (the profiles are written nonetheless), 2 there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch
from curves import llm_profile, vision_profile
from readings import Check, Load, Pretended, check_readings, check_visibility

KIT = Path(__file__).resolve().parents[2] / "kit"


def load_gpu() -> Any:
    """`kit/gpu.py` and the file beside it that it imports, without the kit's own `__init__`."""
    package = types.ModuleType("kit")
    package.__path__ = [str(KIT)]
    sys.modules["kit"] = package
    return importlib.import_module("kit.gpu")


def checked(gpu: Any, device: str, tiny: bool) -> list[Check]:
    """All checks of readings; the first is that the GPU of torch is one that `kit.gpu` reads."""
    devices = [d for d in gpu.devices() if d.visible]
    for d in devices:
        print(
            f"     {d.uuid}: {d.label}, MIG: {d.mig}; unsupported: {', '.join(d.unsupported) or 'none'}"
        )
    # torch says nothing of whether it is a GPU's or an instance's.
    told = str(torch.cuda.get_device_properties(0).uuid) if device == "cuda" else ""
    mine = [d.uuid for d in devices if d.uuid.endswith(told)] if told else []
    found = []
    if device == "cuda":
        found = [
            Check("torch's GPU is among the visible", len(mine) == 1, f"{told} in {len(devices)}")
        ]
        found += check_visibility(gpu)
        if not mine:
            return found
    load = Load(device)
    read, uuid = (gpu, mine[0]) if mine else (Pretended(load), "GPU-none")
    try:
        return found + check_readings(read, load, uuid, tiny)
    finally:
        load.end()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check GPU readings and measure profiles.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes that mean nothing, to try the way"
    )
    parser.add_argument("--out", type=Path, default=Path("profiles.json"))
    asked = parser.parse_args(argv)
    gpu, device, tiny = load_gpu(), asked.device, asked.tiny or asked.device == "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        why = (
            gpu.why_none()
            or "NVML has readings, so this torch is built without CUDA, or too new for the driver."
        )
        print(f"check_gpu: torch sees no GPU. {why}", file=sys.stderr)
        return 2
    if device == "cpu":
        torch.set_num_threads(
            1
        )  # threads that wait for each other are slower on a machine with other work
    begun_s = time.monotonic()
    checks = checked(gpu, device, tiny)
    words = {True: "ok  ", False: "BAD ", None: "--  "}
    pretended = "" if device == "cuda" else " (pretended)"
    for c in checks:
        print(f"{words[c.ok]} {c.what}: {c.text}{pretended}", flush=True)

    name = torch.cuda.get_device_name(0) if device == "cuda" else "no GPU (a CPU)"
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    software = f"driver {gpu.driver() or 'none'}, torch {torch.__version__}"
    evidence = f"measured on {name}, {software}, on {today} by tests/gpu/check_gpu.py"
    if tiny:
        evidence = (
            f"NOT an accelerator's: the script tried out with sizes that mean nothing; {evidence}"
        )
    old = device == "cuda" and torch.cuda.get_device_capability(0) < (8, 0)
    dtype = torch.float32 if device == "cpu" else torch.float16 if old else torch.bfloat16
    memory = torch.cuda.get_device_properties(0).total_memory if device == "cuda" else 2**33
    slug = "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
    profiles = {
        f"{slug}.llama-3.1-8b.measured": llm_profile(device, tiny, name, evidence, memory, dtype),
        f"resnet50.{slug}-pytorch{torch.__version__.split('+')[0]}": vision_profile(
            device, tiny, name, evidence
        ),
    }
    told = {
        "about": "Latency models of one accelerator, in seconds, tokens and images.",
        "source": evidence,
    }
    asked.out.write_text(json.dumps(told | {"profiles": profiles}, indent=1) + "\n")
    _table(profiles)
    print(f"written: {asked.out}; took {time.monotonic() - begun_s:.0f} s")
    return 1 if any(c.ok is False for c in checks) else 0


def _table(profiles: dict[str, Any]) -> None:
    """The fits for people."""
    for name, p in profiles.items():
        print(name)
        for part in ("decode", "prefill", "latency"):
            for key, value in p.get(part, {}).items():
                print(
                    f"  {part:8} {key:28} {value:.4g}"
                    if isinstance(value, float)
                    else f"  {part:8} {key:28} {value}"
                )


if __name__ == "__main__":
    sys.exit(main())
