"""What vLLM tells after each model step, as the figures that the kit samples."""

from __future__ import annotations

from typing import Any


class Meter:
    """Takes what vLLM tells after each model step; made to fit its `StatLoggerBase`."""

    def __init__(self) -> None:
        self.steps = 0
        self.sequences = 0  # in the last step, those that ended with it included
        self.running = 0
        self._waiting = 0
        self._kv_cache_share = 0.0
        self._preemptions = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        if iteration_stats is not None:
            ended = len(iteration_stats.finished_requests)
            self.steps += 1
            self._preemptions += iteration_stats.num_preempted_reqs
            self.sequences = ended + (scheduler_stats.num_running_reqs if scheduler_stats else 0)
        if scheduler_stats is not None:
            self.running = scheduler_stats.num_running_reqs
            self._waiting = (
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )
            self._kv_cache_share = scheduler_stats.kv_cache_usage
            self._queried_tokens += scheduler_stats.prefix_cache_stats.queries
            self._hit_tokens += scheduler_stats.prefix_cache_stats.hits

    def figures(self) -> dict[str, float]:
        queried = self._queried_tokens
        return {
            "running_sequences": self.running,
            "waiting_sequences": self._waiting,
            "kv_cache_share": self._kv_cache_share,
            "preemptions": self._preemptions,
            "prefix_cache_hit_share": self._hit_tokens / queried if queried else 0.0,
            "prefix_cache_queried_tokens": queried,
            "prefix_cache_hit_tokens": self._hit_tokens,
        }

    def log(self) -> None: ...

    def log_engine_initialized(self) -> None: ...

    def record_sleep_state(self, *_: Any, **__: Any) -> None: ...
