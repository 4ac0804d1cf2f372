"""ResNet-50 and Llama-3.1-8B of random weights, in plain torch: times do not depend on values."""

from __future__ import annotations

from collections.abc import Callable
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
