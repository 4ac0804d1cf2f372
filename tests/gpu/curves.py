"""Latency curves of a GPU, in the form of `data/accelerators.json`: ResNet-50 and Llama-3.1-8B.

Weights are random, since time does not depend on their values; everything else is as the models are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD, LAYERS = 4096, 14336, 32, 8, 128, 32
VOCABULARY = 128_256
LAYER_BYTES = 2 * HIDDEN * ((2 * HEADS + 2 * KV_HEADS) * HEAD + 3 * FEED_FORWARD)
HEAD_BYTES = 2 * HIDDEN * VOCABULARY
"""As many again are the embeddings, which take room and no time."""
KV_BYTES = 2 * 2 * KV_HEADS * HEAD * LAYERS
"""Of a token in 16 bits, all layers."""
MEMORY_SHARE = 0.9
"""What an engine takes of the GPU's memory for weights and KV cache: vLLM's own default."""


class Block(nn.Module):
    """A bottleneck of ResNet-50 (He et al. 2015), stride in its 3 × 3 convolution."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width

        def conv(a: int, b: int, size: int, step: int = 1) -> nn.Sequential:
            kernel = nn.Conv2d(a, b, size, step, size // 2, bias=False)
            return nn.Sequential(kernel, nn.BatchNorm2d(b))

        self.way = nn.Sequential(
            conv(inside, width, 1), nn.ReLU(), conv(width, width, 3, stride), nn.ReLU(),
            conv(width, outside, 1),
        )  # fmt: skip
        same = inside == outside and stride == 1
        self.beside = nn.Identity() if same else conv(inside, outside, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.way(x) + self.beside(x))


def resnet50() -> nn.Sequential:
    """25.6 million parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
                               nn.MaxPool2d(3, 2, 1)]  # fmt: skip
    inside = 64
    for width, blocks, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for k in range(blocks):
            layers.append(Block(inside, width, stride if k == 0 else 1))
            inside = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


class Llama:
    """Layers of Llama-3.1-8B's shape and its head; without rotary embedding and sampling."""

    def __init__(self, layers: int, shrink: int, device: str, dtype: torch.dtype) -> None:
        self.hidden, feed, self.heads, self.kv, words = (
            v // shrink for v in (HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, VOCABULARY)
        )
        self.make: dict[str, Any] = {"device": device, "dtype": dtype}
        self.widths = [self.heads * HEAD, self.kv * HEAD, self.kv * HEAD]
        shapes = [(self.hidden, sum(self.widths)), (self.heads * HEAD, self.hidden),
                  (self.hidden, 2 * feed), (feed, self.hidden)]  # fmt: skip
        self.weights = [[torch.randn(s, **self.make) * 0.02 for s in shapes] for _ in range(layers)]
        self.head = torch.randn((self.hidden, words), **self.make) * 0.02

    @property
    def weight_bytes(self) -> int:
        every = [self.head, *(w for layer in self.weights for w in layer)]
        return sum(w.numel() * w.element_size() for w in every)

    def tokens(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.hidden, **self.make)

    def caches(self, sequences: int, context: int, room_bytes: float) -> list[list[torch.Tensor]]:
        """A K and a V for every layer, or as many as there is room for; those are used in turn."""
        shape = (sequences, self.kv, context, HEAD)
        one = 2 * sequences * self.kv * context * HEAD * self.head.element_size()
        count = min(len(self.weights), int(room_bytes // one))
        return [
            [torch.empty(shape, **self.make).uniform_(-1, 1) for _ in "kv"] for _ in range(count)
        ]

    def decode(self, x: torch.Tensor, caches: list[list[torch.Tensor]]) -> torch.Tensor:
        """One step: the next token of each row of x, whose context fills a cache."""

        def attend(k: int, q: torch.Tensor, *new: torch.Tensor) -> torch.Tensor:
            for kept, fresh in zip(caches[k % len(caches)], new, strict=True):
                kept[:, :, -1] = fresh.view(len(x), self.kv, HEAD)
            # Heads that share a K are its queries: the same sums, each K and V read once.
            shared = q.view(len(x), self.kv, self.heads // self.kv, HEAD)
            found = functional.scaled_dot_product_attention(shared, *caches[k % len(caches)])
            return found.reshape(len(x), -1)

        return self._layers(x, attend)

    def prefill(self, x: torch.Tensor) -> torch.Tensor:
        """One prompt, whose tokens are the rows of x, up to its first output token."""

        def attend(k: int, *qkv: torch.Tensor) -> torch.Tensor:
            q, *both = (t.view(1, len(x), -1, HEAD).transpose(1, 2) for t in qkv)
            keys, values = (t.repeat_interleave(self.heads // self.kv, dim=1) for t in both)
            found = functional.scaled_dot_product_attention(q, keys, values, is_causal=True)
            return found.transpose(1, 2).reshape(len(x), -1)

        return self._layers(x, attend, last=True)

    def _layers(
        self, x: torch.Tensor, attend: Callable[..., torch.Tensor], last: bool = False
    ) -> torch.Tensor:
        def norm(y: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(y, (self.hidden,))

        for k, (qkv, out, up, down) in enumerate(self.weights):
            x = x + attend(k, *(norm(x) @ qkv).split(self.widths, dim=-1)) @ out
            gate, rest = (norm(x) @ up).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * rest) @ down
        return (norm(x[-1:] if last else x) @ self.head).argmax(-1)


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
