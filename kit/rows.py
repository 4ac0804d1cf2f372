"""The columns of a run's requests: what the load generator writes and tables are read by."""

from __future__ import annotations

REQUEST_COLUMNS = (
    "request", "attempt", "intended_s", "sent_s", "client_wait_s", "e2e_s", "response_s",
    "queueing_s", "router_s", "batch_wait_s", "engine_queue_s", "inference_s", "prefill_s",
    "decode_s", "postprocess_s", "rest_s", "ttft_s", "tpot_s", "itl_ms", "outcome", "status",
    "route", "replica_id", "batch_id", "batch_size", "batch_fill_s", "batch_run_s",
    "prompt_tokens", "output_tokens", "finish_reason", "error",
)  # fmt: skip
"""Columns of a run's requests: seconds since its start, tokens; empty where unobserved.

Each attempt is a row; attempts of one request share its number. `intended_s` is when the load's plan
wanted it sent, or when its user was ready to; `client_wait_s` is sent − intended, `response_s` that
and `e2e_s`. `batch_fill_s` and `batch_run_s` are of the whole batch, as Serve's own metrics measure
them. `itl_ms` is a text: the gaps between a stream's pieces in milliseconds, with blanks between.
"""

TEXT_COLUMNS = ("itl_ms", "outcome", "route", "replica_id", "finish_reason", "error")
