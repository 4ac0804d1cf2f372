"""Named starting points of settings: what Ray means by auto, and what suits chats and throughput."""

from __future__ import annotations

from typing import Any

from kit.settings import VISION_ACCELERATOR

RAY_AUTO: dict[str, Any] = {
    "num_replicas": "auto",
    "max_ongoing_requests": 5,
    "target_ongoing_requests": 2.0,
    "min_replicas": 1,
    "max_replicas": 100,
}
"""What Ray Serve means by `num_replicas="auto"`."""

PRESETS: dict[str, dict[str, Any]] = {
    "chat": {"max_batch_size": 8, "batch_wait_timeout_s": 0.01},
    "throughput": {"max_batch_size": 32, "batch_wait_timeout_s": 0.05},
    "auto": RAY_AUTO,
    "resnet50": {"app": "resnet50", "accelerator": VISION_ACCELERATOR, **RAY_AUTO},
}
"""Named starting points, to be passed to `replace`: `settings.replace(**PRESETS["chat"])`."""
