"""Latency curves of a GPU, in the form of `data/accelerators.json`: ResNet-50 and Llama-3.1-8B."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import HEAD_BYTES, KV_BYTES, LAYER_BYTES, LAYERS, Llama, resnet50

MEMORY_SHARE = 0.9
"""What an engine takes of the GPU's memory for weights and KV cache: vLLM's own default."""


def timed_s(work: Callable[[], Any], device: str, most: int, budget_s: float = 1.5) -> float:
    """Median time of `work`, warmed up, of 3 to `most` repeats; on a GPU by its own events."""
    warm_s = time.monotonic()
    for _ in range(3):
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        if time.monotonic() - warm_s > budget_s:
            break
    times: list[float] = []
    while len(times) < 3 or (len(times) < most and sum(times) < budget_s):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        else:
            begun_s = time.perf_counter()
            work()
            times.append(time.perf_counter() - begun_s)
    return statistics.median(times)


def graphed(work: Callable[[], Any], device: str) -> Callable[[], Any]:
    """The same as a CUDA graph, as engines decode: without the host's time between kernels."""
    if device != "cuda":
        return work
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        work()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def fit(columns: Sequence[Sequence[float]], times_s: Sequence[float]) -> list[float]:
    """Coefficients ≥ 0 of columns, one a column, with the least squares of relative errors."""
    times = torch.tensor(times_s, dtype=torch.float64)
    design = torch.tensor(columns, dtype=torch.float64).T / times[:, None]
    kept, solved = list(range(len(columns))), torch.zeros(0)
    while kept:
        scale = design[:, kept].norm(dim=0)  # tokens by the million stand beside ones
        target = torch.ones(len(times_s), 1, dtype=torch.float64)
        solved = (
            torch.linalg.lstsq(design[:, kept] / scale, target, driver="gelsd").solution[:, 0]
            / scale
        )
        if not (solved < 0).any():
            break
        # What comes out negative is too small to be seen: without it once more.
        kept.pop(int((solved * scale).argmin()))
    found = dict(zip(kept, solved.tolist(), strict=True))
    return [found.get(k, 0.0) for k in range(len(columns))]


def off_percent(model_s: Sequence[float], times_s: Sequence[float]) -> float:
    """Mean absolute error in percent of what was measured."""
    return 100 * statistics.mean(abs(m / t - 1) for m, t in zip(model_s, times_s, strict=True))


def above_floor(sizes: Sequence[int], times_s: Sequence[float], least: int) -> list[int]:
    """Places of the sizes that take clearly longer than the smallest do; `least` at least."""
    found = [k for k, s in enumerate(times_s) if s > 1.2 * min(times_s)]
    return found if len(found) >= least else list(range(len(sizes)))[-max(least, len(found)) :]


def vision_profile(device: str, tiny: bool, name: str, evidence: str) -> dict[str, Any]:
    """ResNet-50 at batches of 1 to 64, in the eager mode in which a torch server runs it."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    model, side = resnet50().eval().to(device, dtype), 32 if tiny else 224
    sizes, times = [1, 2, 4] if tiny else [1, 2, 4, 8, 16, 32, 64], []
    with torch.inference_mode():
        for n in sizes:
            images = torch.randn(n, 3, side, side, device=device, dtype=dtype)
            times.append(timed_s(lambda x=images: model(x), device, 3 if tiny else 30))
            print(f"  ResNet-50, batch {n:3}: {times[-1] * 1e3:8.2f} ms", flush=True)
    floor, line = min(times), above_floor(sizes, times, 2)
    a, b = fit([[1.0] * len(line), [sizes[k] for k in line]], [times[k] for k in line])
    off = off_percent([max(floor, a + b * n) for n in sizes], times)
    kind = str(dtype).removeprefix("torch.")
    return {
        "accelerator": name, "model": "ResNet-50", "kind": "vision",
        "software": f"PyTorch {torch.__version__} {kind} eager",
        "latency": {"floor_s": floor, "a_s": a, "b_s_per_image": b, "fit_mape_percent": round(off, 2),
                    "points": len(sizes)},
        "measured": {"images": sizes, "latency_s": times},
        "evidence": f"{evidence}; ResNet-50 of random weights in {kind}, eager, medians by GPU events; a "
                    f"line through {len(line)} of {len(sizes)} batches, {off:.1f} % off on average; not "
                    "checked inside a server",
    }  # fmt: skip


def llm_profile(
    device: str, tiny: bool, name: str, evidence: str, memory_bytes: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Llama-3.1-8B: its decode step by sequences and KV tokens, its prefill by prompt tokens.

    Where its 32 layers do not fit, as many as do are measured, and the profile is of as many such GPUs
    one after another as all layers need.
    """
    fitting = int((0.7 * memory_bytes - HEAD_BYTES) // LAYER_BYTES)
    layers = 1 if tiny else max(1, min(LAYERS, fitting))
    with torch.inference_mode():
        model = Llama(layers, 8 if tiny else 1, device, dtype)
        one = model.tokens(1)
        head_s = timed_s(lambda: (one @ model.head).argmax(-1), device, 10)

        def whole_s(measured_s: float) -> float:
            share = 1 if tiny else LAYERS / layers
            return head_s + max(measured_s - head_s, 0.0) * share if share > 1 else measured_s

        steps, in_turn = _decode_steps(model, device, tiny, whole_s)
        prompts = [16, 64, 128] if tiny else [16, 128, 512, 1024, 2048, 4096, 8192]
        prefills = []
        for length in prompts:
            work = _prefilling(model, length)
            prefills.append(whole_s(timed_s(work, device, 10)))
            print(f"  prefill, {length:5} tokens: {prefills[-1] * 1e3:8.2f} ms", flush=True)
    counts, context, times = (list(c) for c in zip(*steps, strict=True))
    columns = [[1.0] * len(times), counts, context]
    d, e, f = fit(columns, times)
    off = off_percent([d + e * n + f * k for n, k, _ in steps], times)
    left_out = []
    for i in range(len(times)):
        rest = [[c for k, c in enumerate(column) if k != i] for column in columns]
        di, ei, fi = fit(rest, [t for k, t in enumerate(times) if k != i])
        left_out.append(di + ei * counts[i] + fi * context[i])
    floor, line = min(prefills), above_floor(prompts, prefills, 3)
    powers = [[float(prompts[k]) ** p for k in line] for p in (0, 1, 2)]
    a, b, c = fit(powers, [prefills[k] for k in line])
    prefill_off = off_percent([max(floor, a + b * n) + c * n**2 for n in prompts], prefills)
    room = (
        MEMORY_SHARE * memory_bytes - model.weight_bytes - (HEAD_BYTES if layers == LAYERS else 0)
    )
    kind = str(dtype).removeprefix("torch.")
    caches = "of every layer" if in_turn >= layers else f"of {in_turn} layers in turn"
    row = "" if layers == LAYERS else (
        f"only {layers} of {LAYERS} layers were measured: times are those of {LAYERS / layers:.1f} such "
        "GPUs one after another, without what passes between them; "
    )  # fmt: skip
    return {
        "accelerator": name, "model": "Llama-3.1-8B", "weights": kind, "tensor_parallel": 1,
        "kind": "llm",
        "decode": {"d_s": d, "e_s_per_sequence": e, "f_s_per_context_token": f,
                   "max_sequences": int(max(counts)), "fit_mape_percent": round(off, 2),
                   "leave_one_out_mape_percent": round(off_percent(left_out, times), 2),
                   "points": len(times)},
        "prefill": {"floor_s": floor, "a_s": a, "b_s_per_token": b, "c_s_per_token2": c,
                    "fit_mape_percent": round(prefill_off, 2), "points": len(prompts),
                    "tokens_range": [prompts[0], prompts[-1]]},
        "host_overhead_s_per_step": 0.0, "kv_bytes_per_token": KV_BYTES,
        "kv_capacity_tokens": int(room / (KV_BYTES * layers / LAYERS)),
        "weight_bytes": model.weight_bytes,
        "measured": {"sequences": counts, "context_tokens": context, "step_s": times,
                     "prompt_tokens": prompts, "prefill_s": prefills},
        "evidence": f"{evidence}; random weights in {kind}, medians by GPU events, {row}decode as a CUDA "
                    f"graph, KV caches {caches}, {off:.1f} % off on average; prefill eager, "
                    f"one prompt, {prefill_off:.1f} % off; no rotary embedding, no sampling, no host "
                    f"overhead of an engine; KV capacity reckoned from {MEMORY_SHARE:.0%} of the memory; "
                    "not checked end to end",
    }  # fmt: skip


def _decode_steps(
    model: Llama, device: str, tiny: bool, whole_s: Callable[[float], float]
) -> tuple[list[tuple[int, int, float]], int]:
    """(sequences, KV tokens of all together, seconds) of each step; and of how many layers caches fit."""
    steps, fewest = [], len(model.weights)
    for n in (1, 2, 4) if tiny else (1, 8, 32, 64, 128):
        for context in (16, 64) if tiny else (128, 1024, 4096):
            room = 0.9 * torch.cuda.mem_get_info()[0] if device == "cuda" else 2**28
            caches = model.caches(n, context, room)
            if not caches:
                print(f"  decode step, {n:3} × {context:4} tokens: no room", flush=True)
                continue
            fewest = min(fewest, len(caches))
            work = graphed(_decoding(model, n, caches), device)
            took_s = whole_s(timed_s(work, device, 3 if tiny else 20))
            steps.append((n, n * context, took_s))
            print(f"  decode step, {n:3} × {context:4} tokens: {took_s * 1e3:8.2f} ms", flush=True)
            del caches, work
            if device == "cuda":
                torch.cuda.empty_cache()
    return steps, fewest


def _decoding(model: Llama, sequences: int, caches: list[list[torch.Tensor]]) -> Callable[[], Any]:
    x = model.tokens(sequences)
    return lambda: model.decode(x, caches)


def _prefilling(model: Llama, length: int) -> Callable[[], Any]:
    x = model.tokens(length)
    return lambda: model.prefill(x)
