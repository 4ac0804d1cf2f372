"""What a run shows, in words and tables for people: each sentence carries its figures."""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
from IPython.display import Markdown

from kit import advise, measures, phases, summary, validity
from kit.accelerator import any_profile
from kit.lengths import source
from kit.provenance import accelerator_note
from kit.settings import BY_NAME, Settings
from kit.store import Run
from kit.view import View
from kit.windows import over_time

SAME = 0.1
"""Changes within ± 10 % are called *about the same*: runs on shared machines differ by as much."""


def moved(name: str, before: float, after: float, unit: str) -> str:
    """`queueing p95 fell from 3.2 s to 1.1 s (÷ 2.9)`; says so where a figure is missing."""
    if math.isnan(before) or math.isnan(after):
        return f"{name} cannot be compared (no request ended in one of the stretches)"
    pair = f"{before:.3g} → {after:.3g} {unit}"
    if abs(after - before) <= SAME * max(abs(before), 1e-12):
        return f"{name} stayed about the same ({pair})"
    if after > before:
        times = f", × {after / before:.1f}" if before > 0 else ""
        return f"{name} rose ({pair}{times})"
    times = f", ÷ {before / after:.1f}" if after > 0 else ""
    return f"{name} fell ({pair}{times})"


def reaction_s(run: Run, from_s: float, until_s: float) -> float:
    """Seconds from `from_s` to the first added replica serving; NaN when none was added."""
    running = measures.series(run, "serve", "running_replicas")
    before = running[running.index <= from_s]
    after = running[(running.index > from_s) & (running.index < until_s)]
    more = after[after > (before.iloc[-1] if len(before) else 0)]
    return float(more.index[0]) - from_s if len(more) else math.nan


def bullets(sentences: list[str]) -> Markdown:
    """Sentences as a list that a notebook shows."""
    return Markdown("\n".join(f"- {s}" for s in sentences) or "- nothing")


def changes(run: Run) -> list[str]:
    """One paragraph for each change that took effect, and one for each that was refused."""
    table = phases.stretches(run)
    texts = []
    for k in range(1, len(table)):
        before, after = table.iloc[k - 1], table.iloc[k]
        texts.append(f"**{after['label']}** — {_effect(run, before, after)}")
    for move in measures.records(measures.moves(run)):
        if move["error"]:
            texts.append(f"**{move['label']}** — refused: {move['error']}")
    return texts


def _effect(run: Run, before: pd.Series[float], after: pd.Series[float]) -> str:
    parts = [
        moved("queueing p95", before["queueing_p95_s"], after["queueing_p95_s"], "s"),
        moved("inference p95", before["inference_p95_s"], after["inference_p95_s"], "s"),
        moved("throughput", before["throughput_rps"], after["throughput_rps"], "requests/s"),
        moved("requests in a batch", before["batch_size"], after["batch_size"], "on average"),
    ]
    if math.isnan(before["replicas"]) or math.isnan(after["replicas"]):
        parts.append("replicas were not seen in one of them")
    elif before["replicas"] == after["replicas"]:
        parts.append(f"replicas stayed at {after['replicas']:.0f}")
    else:
        wait_s = reaction_s(run, float(after["start_s"]), float(after["end_s"]))
        parts.append(
            f"replicas went from {before['replicas']:.0f} to {after['replicas']:.0f}"
            + ("" if math.isnan(wait_s) else f", the first new one serving after {wait_s:.1f} s")
        )
    unsteady = [k for k, t in (("before", before), ("after", after)) if not t["steady"]]
    if unsteady:
        parts.append(f"not steady {' and '.join(unsteady)} it, so take these figures with care")
    return "; ".join(parts) + "."


def dominant(run: Run) -> str:
    """What is going on in the last stretch: which part of the latency dominates, why, what to try."""
    return f"At the end: {advise.sentence(_at_the_end(run))}"


def _at_the_end(run: Run) -> View:
    """The last stretch of a run, after settling, as a view."""
    last = phases.stretches(run).iloc[-1]
    from_s, end_s = float(last["from_s"]), float(last["to_s"])
    ended = measures.finished_s(run.requests)
    done = run.changes[(run.changes["error"] == "") & run.changes["knob"].isin(BY_NAME)]
    moved_to = {c["knob"]: _value(c["knob"], c["to"]) for c in measures.records(done)}
    return View(
        now_s=end_s,
        span_s=end_s - float(last["start_s"]),
        settings=Settings(**run.experiment["settings"]).replace(**moved_to),
        slo=run.experiment["slo"],
        windows=over_time(run),
        recent=run.requests[(ended >= from_s) & (ended < end_s)],
        recent_s=end_s - from_s,
        samples=run.samples[run.samples["time_s"].between(float(last["start_s"]), end_s)],
        changes=run.changes,
        replica_seconds=measures.replica_seconds(run),
    )


def _value(knob: str, text: str) -> Any:
    """The value of a knob that a table of changes holds as text."""
    try:
        return text if BY_NAME[knob].kind == "text" else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word among numbers, such as auto


def what_ran(run: Run) -> list[str]:
    """What was served to whom, and how far it can be trusted."""
    settings, load = run.experiment["settings"], run.experiment["workload"]
    emulated = settings.get("engine", "emulated") == "emulated"
    scale = settings["time_scale"] if emulated else 1
    count = len(measures.ok(run.requests))
    if emulated:
        p = any_profile(settings["accelerator"])
        where = f"an **{p.label}**. Evidence for its times: {p.evidence}"
    else:
        where = f"**{accelerator_note(run)}**"
    texts = [
        f"**{settings['app']} app** on {where}.",
        f"**Load**: {_load_words(load)}, seed {load['seed']}: {count} requests succeeded of "
        f"{len(run.requests)}.",
    ]
    if scale != 1:
        texts.append(
            f"**Clock**: the accelerator's times are multiplied by {scale:g}, so that a small "
            f"machine sees enough requests in short time. All seconds here, the promises included, "
            f"are on that clock: 1 s stands for {1 / scale:.1f} s of the real accelerator. Waits "
            "and overheads around it are real and not scaled."
        )
    if why := validity.invalid(run):
        texts.insert(0, f"**Invalid: {why}.** What this run shows may have that for its reason.")
    ended = "" if run.status == "complete" else f"**This run is {run.status}.** "
    return texts + [f"{ended}Note: {n}" for n in run.notes]


def _sender_words(load: Mapping[str, Any]) -> str:
    arrivals = load.get("arrivals", "users")
    if arrivals == "users":
        pause = load["think_time_s"]
        words = f"{load['users']} closed-loop users"
        return words + (f" with a mean pause of {pause:g} s" if pause else " without pauses")
    if arrivals == "trace":
        return f"the trace {load['trace']} sent again, {load['speed_up']:g} times as fast,"
    words = f"{arrivals} arrivals at {load['rate_rps']:g} requests/s, whoever waits,"
    if arrivals == "on-off":
        words += f" in spells of {load['on_s']:g} s with pauses of {load['off_s']:g} s,"
    if load.get("diurnal"):
        words += f" over days of {load['day_s']:g} s ({load['diurnal']}),"
    if most := load.get("max_concurrency"):
        words += f" at most {most} under way,"
    return words


def _load_words(load: Mapping[str, Any]) -> str:
    words = f"{_sender_words(load)} for {load['duration_s']:g} s, "
    if load.get("kind") == "image":
        return words + "an image each"
    fixed = [load.get("prompt_tokens"), load.get("output_tokens")]
    if load.get("trace"):
        words += "lengths as recorded"
    elif None not in fixed:
        words += f"prompts of {fixed[0]} and outputs of {fixed[1]} tokens"
    else:
        words += f"request lengths of {source(load['lengths'])}"
        if share := load.get("mix_share"):
            words += f", {share:.0%} of them of {source(load['mix_lengths'])}"
        for what, tokens in zip(("prompts", "outputs"), fixed, strict=True):
            if tokens is not None:
                words += f", {what} of {tokens} tokens"
    return words + (", streamed" if load.get("stream") else "")


def verdict_sentences(run: Run) -> list[str]:
    """One sentence for each promise of the SLO."""
    texts = []
    for v in measures.records(summary.verdicts(run)):
        promise = f"{v['slo'].removesuffix('_s').replace('_', ' ')} ≤ {v['limit_s']:g} s"
        if v["met_at_the_end"] is None:
            texts.append(f"**{promise}: no figure** (no successful request)")
            continue
        word = "met" if v["met_at_the_end"] else "missed"
        if not measures.enough(v["requests_at_the_end"], 95):
            word += f", as far as {v['requests_at_the_end']:.0f} requests tell"
        texts.append(
            f"**{promise}: {word}** in the last stretch ({v['last_stretch_s']:.2f} s; "
            f"{v['whole_run_s']:.2f} s over the whole run)"
        )
    return texts


def phase_table(run: Run) -> pd.DataFrame:
    """The stretches of a run as a table for people; unit in each heading."""
    t = phases.stretches(run)
    # A tail of so few requests is no figure.
    tails = [c for c in map(str, t) if c.endswith("_p95_s")]
    t[tails] = t[tails].where(t["requests"].map(lambda n: measures.enough(n, 95)))
    return pd.DataFrame(
        {
            "from": t["label"],
            "throughput (requests/s)": t["throughput_rps"].round(1),
            "output (tokens/s)": t["output_tokens_per_s"].round(0),
            "E2E p50 (s)": t["e2e_p50_s"].round(2),
            "E2E p95 (s)": t["e2e_p95_s"].round(2),
            "response p95 (s)": t["response_p95_s"].round(2),
            "queueing p95 (s)": t["queueing_p95_s"].round(2),
            "inference p95 (s)": t["inference_p95_s"].round(2),
            "batch (requests)": t["batch_size"].round(1),
            "replicas": t["replicas"],
            "accelerator busy (%)": (t["busy_share"] * 100).round(0),
            "measured": [
                f"{a:.1f} to {b:.1f} s, {'steady' if steady else 'not steady'}"
                for a, b, steady in zip(t["from_s"], t["to_s"], t["steady"], strict=True)
            ],
        }
    ).set_index("from")


def phase_list(run: Run) -> pd.DataFrame:
    """What the run went through, from warm-up to steady state, as a table for people."""
    t = phases.found(run)
    return pd.DataFrame(
        {
            "phase": t["phase"],
            "from (s)": t["from_s"].round(1),
            "to (s)": t["to_s"].round(1),
            "began with": t["why"],
            "requests": t["requests"],
        }
    ).set_index("phase")


def comparison_table(runs: Mapping[str, Run]) -> pd.DataFrame:
    """The last stretch of several runs, a row each; says which are invalid, and why."""
    rows = [phase_table(r).tail(1).set_axis([name]) for name, r in runs.items()]
    whys = [validity.invalid(r) for r in runs.values()]
    table = pd.concat(rows)
    return table.assign(invalid=whys) if any(whys) else table


def environment_table(run: Run, summary: Mapping[str, Any]) -> pd.DataFrame:
    """What the figures depend on beside the settings."""
    here = dict(run.environment)
    packages = here.pop("packages")
    here["memory (GiB)"] = f"{here.pop('memory_bytes') / 2**30:.1f}"
    changed = summary["change_applied_median_s"]
    rows = {
        "run": run.run_id,
        **{k.replace("_", " "): v if v else "none" for k, v in here.items()},
        **packages,
        "changes applied after (median)": "none made" if changed is None else f"{changed:.2f} s",
        "replicas restarted by changes": f"{summary['restarted_replicas']:.0f}",
        "parts miss E2E by (p99)": f"{1e3 * (summary['identity_error_p99_s'] or 0):.2f} ms",
    }
    return pd.DataFrame({"": {k: str(v) for k, v in rows.items()}})
