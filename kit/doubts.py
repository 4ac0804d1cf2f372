"""Combinations of knobs that work but will probably surprise."""

from __future__ import annotations

from kit.settings import Settings


def doubts(settings: Settings) -> list[str]:
    """What works but will probably surprise: a sentence each, saying what will happen."""
    found = []
    auto = settings.num_replicas == "auto"
    batches = settings.app in ("batched", "resnet50-batched")
    if batches and settings.max_batch_size > settings.max_ongoing_requests:
        found.append(
            f"max_batch_size = {settings.max_batch_size} is above max_ongoing_requests = "
            f"{settings.max_ongoing_requests}: no batch will hold more than "
            f"{settings.max_ongoing_requests} requests, and each will wait the full "
            f"batch_wait_timeout_s = {settings.batch_wait_timeout_s:g} s."
        )
    if settings.app == "continuous" and settings.max_num_seqs > settings.max_ongoing_requests:
        found.append(
            f"max_num_seqs = {settings.max_num_seqs} is above max_ongoing_requests = "
            f"{settings.max_ongoing_requests}: no more than {settings.max_ongoing_requests} "
            "sequences will ever run together; the rest of the requests wait in the router."
        )
    if auto and settings.max_replicas == settings.min_replicas:
        found.append(
            f"min_replicas = max_replicas = {settings.max_replicas}: the autoscaler is on but will "
            "never add or remove a replica."
        )
    if auto and settings.look_back_period_s <= settings.metrics_interval_s:
        found.append(
            f"look_back_period_s = {settings.look_back_period_s:g} s is not above metrics_interval_s = "
            f"{settings.metrics_interval_s:g} s: the autoscaler will decide on one reading or none, "
            "and its reaction will lag by a whole interval."
        )
    if auto and batches and settings.target_ongoing_requests < settings.max_batch_size:
        found.append(
            f"target_ongoing_requests = {settings.target_ongoing_requests:g} is under one batch of "
            f"{settings.max_batch_size}: replicas will be added before a batch is full, and batches "
            "will stay small."
        )
    if (
        auto
        and settings.proxy == "haproxy"
        and settings.target_ongoing_requests >= settings.max_ongoing_requests
    ):
        found.append(
            f"target_ongoing_requests = {settings.target_ongoing_requests:g} is not below "
            f"max_ongoing_requests = {settings.max_ongoing_requests}: behind HAProxy the autoscaler "
            "does not see requests that queue, so it will not add replicas."
        )
    return found
