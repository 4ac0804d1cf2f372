"""Real vLLM on this machine, through the kit and bare: `python tests/bench_vllm.py [part …]`.

agree    the kit's load against `vllm bench serve`, same server, interleaved
bare     the kit's server against `vllm serve`, same engine and load, interleaved; once behind
         Serve's default proxy, and as `haproxy` behind HAProxy
batches  static against continuous batching on the same model, mixed lengths

Prints ratios; exits 1 when one misses its bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import requests

from kit import breakdown, measures, phases
from kit.experiment import Experiment, run
from kit.load import Load
from kit.models import SMALL, resolve
from kit.serving import Serving, start
from kit.settings import Settings
from kit.workload import Workload

# Without prefix cache, since the same prompts are sent by several clients in turn.
VLLM = Settings(
    app="continuous", engine="vllm", num_cpus=1.0, max_model_len=2048, max_ongoing_requests=128,
    enable_prefix_caching=False,
)  # fmt: skip
USERS, ROUNDS, REQUESTS = 8, 3, 200
PORT, BARE_PORT = 8000, 8009
missed: list[str] = []


def bound(name: str, value: float, low: float, high: float) -> None:
    """Print a ratio with its bounds, and remember a miss."""
    verdict = "" if low <= value <= high else "   MISSED"
    print(f"{name:58} {value:7.3f}   [{low:g}, {high:g}]{verdict}", flush=True)
    if verdict:
        missed.append(name)


def load_of(seed: int, duration_s: float = 60.0) -> Workload:
    """Closed-loop users and streams. Equal lengths would keep the users in step, or not, by chance."""
    return Workload(lengths="short", users=USERS, stream=True, duration_s=duration_s, seed=seed)


def kit_load(url: str, folder: Path, duration_s: float, seed: int) -> pd.DataFrame:
    """Rows of the kit's load."""
    place = Path(tempfile.mkdtemp(dir=folder))
    workload = load_of(seed, duration_s)
    load = Load(workload, url, place)
    load.begin(time.monotonic())
    time.sleep(duration_s)
    load.stop()
    rows = load.rows()
    assert (rows["outcome"] == "ok").all(), rows["outcome"].value_counts()
    return rows


def vllm_bench(url: str, folder: Path, seed: int) -> dict[str, Any]:
    """The same requests by `vllm bench serve`; its own result file."""
    workload = load_of(seed)
    requests_file, out = folder / f"requests-{seed}.jsonl", folder / f"bench-{seed}.json"
    with requests_file.open("w") as file:
        for k, row in workload.requests(REQUESTS).iterrows():
            prompt = workload.prompt(int(str(k)), int(row["prompt_tokens"]))
            line = {"prompt": prompt, "output_tokens": int(row["max_tokens"])}
            file.write(json.dumps(line) + "\n")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai",
         "--base-url", url, "--model", SMALL, "--tokenizer", resolve(""),
         "--dataset-name", "custom", "--dataset-path", str(requests_file), "--disable-shuffle",
         "--custom-output-len", "-1", "--skip-chat-template",
         "--num-prompts", str(REQUESTS),
         "--max-concurrency", str(USERS), "--ignore-eos", "--seed", str(seed),
         "--save-result", "--result-filename", str(out), "--temperature", "0",
         "--percentile-metrics", "ttft,tpot,itl,e2el"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return dict(json.loads(out.read_text()))


def agree(serving: Serving, folder: Path) -> None:
    """Median TTFT, TPOT and E2E within 10 %, throughput within 5 %."""
    kit_load(serving.url, folder, 10, seed=99)  # warm
    theirs, ours = [], []
    for k in range(ROUNDS):
        bench = vllm_bench(serving.url, folder, seed=k)
        assert bench["completed"] == REQUESTS, bench["completed"]
        rows = kit_load(serving.url, folder, bench["duration"], seed=k)
        theirs.append(
            [bench["median_ttft_ms"], bench["median_tpot_ms"], bench["median_e2el_ms"],
             bench["request_throughput"]]
        )  # fmt: skip
        ours.append(
            [*(float(rows[c].median()) * 1e3 for c in ("ttft_s", "tpot_s", "e2e_s")),
             measures.throughput_rps(rows)]
        )  # fmt: skip
        print(f"round {k}: vllm bench {[round(x, 2) for x in theirs[-1]]}, "
              f"kit {[round(x, 2) for x in ours[-1]]} ({len(rows)} requests)", flush=True)  # fmt: skip
    names = ("TTFT (median)", "TPOT (median)", "E2E (median)", "throughput")
    for k, name in enumerate(names):
        ratio = statistics.median(o[k] for o in ours) / statistics.median(t[k] for t in theirs)
        slack = 0.05 if name == "throughput" else 0.1
        bound(f"kit ÷ vllm bench serve: {name}", ratio, 1 - slack, 1 + slack)


@contextlib.contextmanager
def bare_vllm(folder: Path) -> Iterator[str]:
    """`vllm serve` with the engine options of `kit.vllm_engine`."""
    env = os.environ | {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with (folder / "vllm-serve.log").open("wb") as log:
        server = subprocess.Popen(
            [str(Path(sys.executable).parent / "vllm"), "serve", resolve(""),
             "--served-model-name", SMALL, "--host", "127.0.0.1", "--port", str(BARE_PORT),
             "--enforce-eager", "--max-model-len", str(VLLM.max_model_len),
             "--no-enable-prefix-caching", "--max-num-seqs", str(VLLM.max_num_seqs), "--block-size", "32",
             "--max-num-batched-tokens", str(VLLM.max_num_batched_tokens),
             "--kv-cache-memory-bytes", str(2**30), "--disable-uvicorn-access-log"],
            stdout=log, stderr=log, env=env,
        )  # fmt: skip
    url = f"http://127.0.0.1:{BARE_PORT}"
    try:
        deadline = time.monotonic() + 180
        while True:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit((folder / "vllm-serve.log").read_text()[-3000:])
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait()


def bare(serving: Serving, folder: Path) -> None:
    """Output tokens/s at least 0.9 of bare; the difference in TTFT told by its parts."""
    rates: dict[str, list[float]] = {"bare": [], "kit": []}
    ttfts: dict[str, list[float]] = {"bare": [], "kit": []}
    parts = []
    with bare_vllm(folder) as url:
        for k in range(-1, ROUNDS):
            for name, at in (("bare", url), ("kit", serving.url)):
                rows = kit_load(at, folder, 25 if k >= 0 else 8, seed=100 + k)
                if k < 0:
                    continue  # warm
                span_s = measures.finished_s(rows).max() - rows["sent_s"].min()
                rates[name].append(rows["output_tokens"].sum() / span_s)
                ttfts[name].append(rows["ttft_s"].median())
                if name == "kit":
                    parts.append(rows[["router_s", "batch_wait_s", "engine_queue_s", "prefill_s"]])
                print(f"round {k} {name}: {rates[name][-1]:.1f} tokens/s, "
                      f"TTFT {ttfts[name][-1] * 1e3:.1f} ms", flush=True)  # fmt: skip
    more_s = statistics.median(ttfts["kit"]) - statistics.median(ttfts["bare"])
    medians = pd.concat(parts).median() * 1e3
    print(f"TTFT: kit − bare = {more_s * 1e3:.1f} ms; of the kit's TTFT, medians in ms: "
          + ", ".join(f"{k.removesuffix('_s')} {v:.1f}" for k, v in medians.items()))  # fmt: skip
    bound(
        "kit ÷ bare vllm serve: output tokens/s",
        statistics.median(rates["kit"]) / statistics.median(rates["bare"]), 0.9, 10,
    )  # fmt: skip


def batches(serving: Serving, folder: Path) -> None:
    """Continuous at least 1.5 times the throughput of static batches, at lower p95."""
    workload = Workload(
        lengths="short", mix_lengths="long", mix_share=0.2, max_prompt_tokens=48,
        max_output_tokens=160, users=32, duration_s=60.0,
    )  # fmt: skip
    found = {}
    for app in ("batched", "continuous"):
        settings = VLLM.replace(app=app, max_batch_size=16, max_num_seqs=16)
        r = run(Experiment(settings, workload, name=app), serving, folder / app, progress=False)
        last = phases.stretches(r).iloc[-1]
        found[app] = (float(last["throughput_rps"]), float(last["e2e_p95_s"]))
        print(f"{app}: {last['throughput_rps']:.2f} requests/s, E2E p95 {last['e2e_p95_s']:.2f} s, "
              f"outcomes {r.requests['outcome'].value_counts().to_dict()}", flush=True)  # fmt: skip
        if app == "batched":
            share = breakdown.useful_share_total(r)
            print(f"useful share of the static batches' slots: {share:.0%}", flush=True)
    static, continuous = found["batched"], found["continuous"]
    bound("continuous ÷ static: throughput", continuous[0] / static[0], 1.5, 100)
    bound("continuous ÷ static: E2E p95", continuous[1] / static[1], 0, 1)


PARTS = {"agree": agree, "bare": bare, "haproxy": bare, "batches": batches}


def main() -> None:
    for part in sys.argv[1:] or PARTS:
        print(f"--- {part}", flush=True)
        settings = VLLM.replace(proxy="haproxy") if part == "haproxy" else VLLM
        with tempfile.TemporaryDirectory() as name, start(settings, port=PORT) as serving:
            if part != "batches":
                serving.deploy(settings, timeout_s=300)
            PARTS[part](serving, Path(name))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
