"""`make bench`: what the kit costs, as ratios against a baseline measured in the same run."""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fakes import fake_run
from tqdm import tqdm

from kit import figures, measures
from kit.accelerator import NO_ACCELERATOR
from kit.application import application
from kit.load import Load
from kit.serving import Serving, start
from kit.settings import Settings
from kit.workload import Workload

USERS, SECONDS, ROUNDS = 16, 6, 5

# A plain Locust user with the same requests; counts what was answered within the time.
PLAIN = """
import itertools, json, time
from locust import FastHttpUser, events, task
from kit.workload import Lengths, Workload
w = Workload(); lengths = Lengths(w); numbers = itertools.count(); ended = []
class U(FastHttpUser):
    default_headers = {"Content-Type": "application/json"}
    @task
    def ask(self):
        i = next(numbers); p, o = lengths[i]
        self.client.post("PATH", data=json.dumps(
            {"prompt": w.prompt(i, p), "max_tokens": o, "temperature": 0, "ignore_eos": True}), name="x")
@events.request.add_listener
def count(exception, **_):
    ended.append((time.monotonic(), exception is None))
@events.quitting.add_listener
def tell(**_):
    first = ended[0][0]
    good = sum(ok for t, ok in ended if 1 <= t - first < SECONDS)
    print(json.dumps({"rps": good / (SECONDS - 1)}))
"""


def plain_locust(url: str, path: str, folder: Path) -> float:
    """Requests a second of a plain FastHttpUser, its first second left out."""
    file = folder / "plain.py"
    file.write_text(PLAIN.replace("PATH", path).replace("SECONDS", str(SECONDS)))
    done = subprocess.run(
        [sys.executable, "-m", "locust", "-f", str(file), "--headless", "--host", url, "-u",
         str(USERS), "-r", "1000", "-t", f"{SECONDS + 1}s", "--only-summary"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.strip().splitlines()[-1])["rps"])


def kit_load(url: str, folder: Path) -> float:
    """Rows a second that the kit's generator writes, its first second left out."""
    place = Path(tempfile.mkdtemp(dir=folder))
    load = Load(Workload(users=USERS, duration_s=SECONDS + 1.0), url, place)
    load.begin(time.monotonic())
    time.sleep(SECONDS + 1)
    load.stop()
    good = measures.ok(load.rows())
    since_first_s = measures.finished_s(good) - measures.finished_s(good).min()
    return float(since_first_s.between(1, SECONDS).sum() / (SECONDS - 1))


def deploy_without_split(serving: Serving) -> None:
    """The same unbatched app at /plain, answering without durations, batch or replica."""
    from ray import serve

    from kit.apps import _engine
    from kit.engine import StaticEngine
    from kit.llm import Unbatched

    class Plain(Unbatched):
        def __init__(self, args: dict[str, object]) -> None:
            super().__init__(_engine(args, StaticEngine), "plain", None)

        def timing(self, *_: object) -> dict[str, str]:
            return {}

    assert serving.settings
    app = serve.deployment(
        serve.ingress()(Plain), max_ongoing_requests=64, ray_actor_options={"num_cpus": 0.1},
        user_config=serving.settings.user_config(),
    ).bind(application(serving.settings)["args"])  # fmt: skip
    serve.run(app, name="plain", route_prefix="/plain")


def million_rows() -> dict[str, float]:
    """Time and memory of the summary and the figures of a run of 1,000,000 rows."""
    run = fake_run(1_000_000, duration_s=600.0)
    began_s = time.perf_counter()
    measures.summary(run)
    for figure in (figures.overview(run), figures.distribution(run)):
        figure.savefig(os.devnull, format="png")
    took_s = time.perf_counter() - began_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"took_s": took_s, "peak_bytes": peak}


def main() -> int:
    wrong = 0

    def line(name: str, value: str, bound: str, met: bool) -> None:
        nonlocal wrong
        wrong += not met
        print(f"{'ok  ' if met else 'MISS'}  {name:<62} {value:<34} {bound}", flush=True)

    def ratio(name: str, ours: list[float], theirs: list[float], at_least: float) -> None:
        mine, base = statistics.median(ours), statistics.median(theirs)
        value = f"{mine:.0f} ÷ {base:.0f} requests/s = {mine / base:.3f}"
        line(name, value, f"at least {at_least}", mine / base >= at_least)

    child = subprocess.run(
        [sys.executable, __file__, "million"], capture_output=True, text=True, check=True
    )
    found = json.loads(child.stdout)
    line("summary and figures of 1,000,000 rows: time", f"{found['took_s']:.1f} s", "at most 5 s",
         found["took_s"] <= 5)  # fmt: skip
    line("summary and figures of 1,000,000 rows: memory", f"{found['peak_bytes'] / 1e9:.2f} GB",
         "under 2 GB", found["peak_bytes"] < 2e9)  # fmt: skip

    settings = Settings(app="unbatched", accelerator=NO_ACCELERATOR)
    with tempfile.TemporaryDirectory() as scratch, start(settings, port=8123) as serving:
        folder = Path(scratch)
        serving.deploy(settings)
        deploy_without_split(serving)
        rounds: dict[str, tuple[list[float], Callable[[], float]]] = {
            "kit": ([], lambda: kit_load(serving.url, folder)),
            "locust": ([], lambda: plain_locust(serving.url, "/v1/completions", folder)),
            "no split": ([], lambda: plain_locust(serving.url, "/plain/v1/completions", folder)),
        }
        plain_locust(serving.url, "/plain/v1/completions", folder)  # warm-up
        # Interleaved, so that a slow spell of the machine meets all of them.
        for _ in tqdm(range(ROUNDS), desc="load rounds"):
            for values, go in rounds.values():
                values.append(go())
        got = {name: values for name, (values, _) in rounds.items()}
        ratio("rows recorded ÷ plain Locust on the same no-op app", got["kit"], got["locust"], 0.9)
        ratio("app with the split ÷ without, plain Locust", got["locust"], got["no split"], 0.95)
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["million"]:
        print(json.dumps(million_rows()))
    else:
        sys.exit(main())
