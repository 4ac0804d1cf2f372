"""Sentences on what the apps beyond one model behind one batch show; each carries its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kit import breakdown, measures
from kit.explain import moved
from kit.store import Run


def static_against_continuous(runs: Mapping[str, Run]) -> list[str]:
    """Why the static runs among `runs` are slower than the others at the same load."""
    texts = []
    shares = {name: breakdown.useful_share_total(run) for name, run in runs.items()}
    rates = {name: measures.throughput_rps(run.requests) for name, run in runs.items()}
    for name, share in shares.items():
        if math.isnan(share):
            continue
        texts.append(
            f"**{name}**: {share:.0%} of the token slots of its batches gave a token; {1 - share:.0%} "
            "were lost to requests that were finished and waited for the longest of their batch. "
            f"Filling every slot would give up to {1 / share:.1f} times the tokens."
        )
        for other, run in runs.items():
            if run.experiment["settings"]["app"] == "continuous":
                before, after = (
                    measures.percentile(measures.ok(r.requests)["e2e_s"], 95)
                    for r in (runs[name], run)
                )
                texts.append(
                    f"**{name} → {other}**, which fills a slot as soon as it is free: "
                    f"{moved('throughput', rates[name], rates[other], 'requests/s')}; "
                    f"{moved('E2E p95', before, after, 's')}."
                )
    return texts


def routes(run: Run) -> list[str]:
    """One sentence for each route, and one that compares the fastest with the slowest."""
    table = breakdown.by_route(run)
    texts = [
        f"**{r['route']}**: {r['requests']} requests ({r['throughput_rps']:.2g}/s) of "
        f"{r['prompt_tokens']:.0f} + {r['output_tokens']:.0f} tokens on average; E2E p50 "
        f"{r['e2e_p50_s']:.3g} s, p95 {r['e2e_p95_s']:.3g} s, of which queueing p95 "
        f"{r['queueing_p95_s']:.3g} s and inference p95 {r['inference_p95_s']:.3g} s."
        for r in measures.records(table)
    ]
    if len(table) > 1:
        ordered = table.sort_values("e2e_p95_s")
        fast, slow = ordered.iloc[0], ordered.iloc[-1]
        texts.append(
            f"Apart, **{fast['route']}** requests have a p95 of {fast['e2e_p95_s']:.3g} s; in one "
            f"queue with **{slow['route']}** ones they would wait for outputs of "
            f"{slow['output_tokens']:.0f} tokens, which take {slow['inference_p95_s']:.3g} s at p95."
        )
    return texts


def retries(runs: Mapping[str, Run]) -> list[str]:
    """What each retry policy made of rejections: who was served, and at what cost."""
    texts = []
    for name, run in runs.items():
        wanted = breakdown.demands(run.requests)
        if not len(wanted):
            texts.append(f"**{name}**: no request was sent.")
            continue
        tries = run.requests
        served = wanted["outcome"] == "ok"
        rejected = int((tries["outcome"] == "rejected").sum())
        policy = run.experiment["workload"].get("retry", "none")
        wait_s = measures.percentile(wanted.loc[served, "answer_s"], 95)
        waited = "" if math.isnan(wait_s) else f", p95 of first send to answer {wait_s:.3g} s"
        texts.append(
            f"**{name}** (retry: {policy}): {served.mean():.0%} of {len(wanted)} requests were served "
            f"with {wanted['attempts'].mean():.1f} attempts each (most {wanted['attempts'].max()})"
            f"{waited}; {rejected} of {len(tries)} attempts were rejected. {_MORAL[policy]}"
        )
    return texts


_MORAL = {
    "none": "Who is rejected goes without an answer.",
    "honour": "Waiting as Retry-After says turns rejections into delay instead of load.",
    "storm": "Retrying at once adds work without adding capacity: the server spends its time on "
    "rejecting.",
}
