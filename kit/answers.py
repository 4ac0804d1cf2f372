"""What an answer says, as columns of a row: the server's parts of its latency, or how it failed.

Pure. The durations come in a `Server-Timing` header and an `X-Served-By` header (`kit.replica`), or
as the same two texts in the last event of a stream. An answer without them, as a bare server gives
it, leaves those columns empty.
"""

from __future__ import annotations

import json
import random
from typing import Any

from kit.clock import SERVED_BY

_SERVER = ("batch_wait", "engine_queue", "prefill", "decode", "postprocess")
_BATCH = ("batch_fill", "batch_run")  # of the whole batch, as Serve measures them
STORM_S = 0.005
UNTOLD_RETRY_S = 1.0


def parts(
    timing: str | None, served_by: str | None, clock: str, sent_s: float, finished_s: float
) -> dict[str, Any]:
    """The server's columns of a row.

    Args:
        timing: `batch_wait;dur=1.5, …`, in ms; None from a server that does not tell.
        served_by: replica id, batch id, batch size, clock id, arrived (s), returned (s), route.
        clock: this machine's clock id; with another in `served_by` the two ends share no clock.
        sent_s: when the request was sent, monotonic.
        finished_s: when its last token, or all of a plain answer, was here.
    """
    if timing is None or served_by is None:
        return {"error": f"the answer has no {SERVED_BY}: the server's parts are unknown"}
    try:
        replica, batch, size, their_clock, arrived_s, returned_s, route = served_by.split()
        named = dict(part.strip().split(";dur=") for part in timing.split(","))
        spans = {name: float(named[name]) / 1e3 for name in _SERVER}
        batch_s = {n: float(named[n]) / 1e3 for n in _BATCH if n in named}
        away_s, back_s = float(arrived_s) - sent_s, finished_s - float(returned_s)
    except (ValueError, KeyError) as error:
        return {"error": f"{SERVED_BY} or Server-Timing is not as agreed ({error!r})"}
    row: dict[str, Any] = {f"{name}_s": span for name, span in spans.items()}
    row |= {f"{name}_s": span for name, span in batch_s.items()}
    row |= {"replica_id": replica, "batch_id": batch, "batch_size": size, "route": route}
    row["inference_s"] = row["prefill_s"] + row["decode_s"]
    if their_clock == clock:
        row |= {"router_s": away_s, "rest_s": back_s}
    else:
        # Two clocks: what is not inside the replica cannot be told apart, so all of it is router.
        row["router_s"] = finished_s - sent_s - sum(spans.values())
    row["queueing_s"] = row["router_s"] + row["batch_wait_s"] + row["engine_queue_s"]
    return row


def completion(content: bytes) -> dict[str, Any]:
    """Token counts and finish reason of a plain completion; nothing where the body tells none."""
    try:
        answer = json.loads(content)
        usage = answer["usage"]
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "finish_reason": answer["choices"][0]["finish_reason"],
        }
    except (ValueError, TypeError, KeyError, IndexError):
        return {}


def failure(status: int, content: bytes) -> dict[str, Any]:
    """Outcome and text of an answer that is no success."""
    text = content[:200].decode(errors="replace")
    if status in (429, 503):
        outcome = "rejected"
    elif status in (408, 504):
        outcome = "timeout"
    else:
        outcome = "invalid" if status < 500 else "error"
    return {"outcome": outcome, "error": text}


def pause_s(retry: str, retry_after: str | None, dice: random.Random) -> float:
    """How long a rejected user waits before the next try, by the workload's retry policy.

    With `honour` up to half of the wait is added at random: users who were rejected together would
    come back together otherwise.
    """
    if retry == "storm":
        return dice.uniform(0, STORM_S)
    try:
        asked_s = max(0.0, float(retry_after or UNTOLD_RETRY_S))
    except ValueError:  # a date: allowed by HTTP, sent by none of these servers
        asked_s = UNTOLD_RETRY_S
    return asked_s * dice.uniform(1.0, 1.5)
