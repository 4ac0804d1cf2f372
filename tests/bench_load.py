"""The highest open-loop rate that one load process sustains, against a server that does nothing.

Of the kit, of plain Locust (`constant_throughput`, a user for each request a second) and of
`vllm bench serve`'s client, each on its own against the same server on this machine. A rate is sustained
when what was sent is within 1 % of what was asked for. Prints rates and their ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from kit.load import LEAD_S, Load
from kit.models import SMALL, resolve
from kit.workload import Workload

SECONDS, STEP, SLACK = 8, 1.15, 0.01
FROM_RPS = 200.0
HERE = Path(__file__).parent

PLAIN = """
import json, time
from locust import FastHttpUser, constant_throughput, events, task
sent = []
class U(FastHttpUser):
    wait_time = constant_throughput(1)
    @task
    def ask(self):
        sent.append(time.monotonic())
        self.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, name="x")
@events.quitting.add_listener
def tell(**_):
    first = sent[0]
    inside = sum(2 <= t - first < SECONDS for t in sent)
    print(json.dumps({"rps": inside / (SECONDS - 2)}))
"""


@contextmanager
def noop_server() -> Iterator[str]:
    with subprocess.Popen(
        [sys.executable, str(HERE / "noop_server.py")], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.kill()


def kit(url: str, folder: Path, rate_rps: float) -> float:
    place = Path(tempfile.mkdtemp(dir=folder))
    workload = Workload(
        arrivals="constant", rate_rps=rate_rps, duration_s=float(SECONDS), prompt_tokens=20,
        output_tokens=1,
    )  # fmt: skip
    load = Load(workload, url, place)
    load.begin(time.monotonic() + LEAD_S)
    time.sleep(SECONDS + LEAD_S)
    load.stop()
    sent_s: pd.Series[float] = load.rows()["sent_s"]
    return float(sent_s.between(2, SECONDS, inclusive="left").sum() / (SECONDS - 2))


def plain_locust(url: str, folder: Path, rate_rps: float) -> float:
    file = folder / "plain_open.py"
    file.write_text(PLAIN.replace("SECONDS", str(SECONDS)))
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(file), "--headless", "--host", url, "-u",
         f"{rate_rps:.0f}", "-r", "10000", "-t", f"{SECONDS + 1}s", "--only-summary"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.strip().splitlines()[-1])["rps"])


def vllm_bench(url: str, folder: Path, rate_rps: float) -> float:
    out, count = folder / "bench.json", int(rate_rps * SECONDS)
    lines = json.dumps({"prompt": "a b c", "output_tokens": 1}) + "\n"
    (file := folder / "requests.jsonl").write_text(lines * count)
    done = subprocess.run(
        [str(Path(sys.executable).parent / "vllm"), "bench", "serve", "--backend", "openai",
         "--base-url", url, "--model", SMALL, "--tokenizer", resolve(""), "--dataset-name", "custom",
         "--dataset-path", str(file), "--disable-shuffle", "--custom-output-len", "-1",
         "--skip-chat-template", "--num-prompts", str(count), "--request-rate", str(rate_rps),
         "--burstiness", "1000", "--save-result", "--result-filename", str(out), "--temperature", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"vllm bench serve failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = json.loads(out.read_text())
    assert found["completed"] == count, found["completed"]
    return float(count / found["duration"])


def highest(client: Callable[[str, Path, float], float], url: str, folder: Path) -> float:
    """The last of geometrically rising rates that was sustained; a miss is tried once more."""
    rate_rps, held = FROM_RPS, 0.0
    while True:
        got = max(_sustained(client, url, folder, rate_rps) for _ in range(2 if held else 1))
        if got < (1 - SLACK) * rate_rps:
            return held
        held, rate_rps = rate_rps, rate_rps * STEP


def _sustained(
    client: Callable[[str, Path, float], float], url: str, folder: Path, rate: float
) -> float:
    got = client(url, folder, rate)
    print(f"      {client.__name__:14} asked {rate:7.0f}, sent {got:7.1f} requests/s", flush=True)
    return got


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch, noop_server() as url:
        found = {
            c.__name__: highest(c, url, Path(scratch)) for c in (kit, plain_locust, vllm_bench)
        }
    for name, rate_rps in found.items():
        ratio = found["kit"] / rate_rps if rate_rps else float("inf")
        print(
            f"{name:14} sustains {rate_rps:6.0f} requests/s within 1 %: the kit's ÷ this {ratio:.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
