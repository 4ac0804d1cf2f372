"""The load generator: real Locust against a small server of known behaviour, no Ray."""

from __future__ import annotations

import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import measures
from kit.clock import SERVED_BY, clock_id
from kit.load import Load, LoadError, read_requests
from kit.workload import Stage, Workload

pytestmark = pytest.mark.cluster


class Answers(http.server.BaseHTTPRequestHandler):
    """Sleeps `delays_s` in turn; answers as the apps do, or with `status`."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: no wait for an acknowledgement
    delays_s: tuple[float, ...] = (0.0,)
    status_every: tuple[int, int] = (200, 1)
    count = 0

    def do_GET(self) -> None:
        self._send(200, b"{}")

    def do_POST(self) -> None:
        arrived_s = time.monotonic()
        self.rfile.read(int(self.headers["Content-Length"]))
        cls = type(self)
        number, cls.count = cls.count, cls.count + 1
        time.sleep(self.delays_s[number % len(self.delays_s)])
        inference_s = time.monotonic() - arrived_s
        status, every = self.status_every
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        self._send(
            200 if (number + 1) % every else status,
            json.dumps({"text": "a", "usage": usage}).encode(),
            {
                "Server-Timing": "batch_wait;dur=0, engine_queue;dur=0, prefill;dur=0, "
                f"decode;dur={1e3 * inference_s}",
                SERVED_BY: f"r1 {number} 1 {clock_id()} {arrived_s} {time.monotonic()}",
            },
        )

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[type[Answers]]:
    class Here(Answers):
        url = ""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as httpd:
        Here.url = f"http://127.0.0.1:{httpd.server_port}"
        threading.Thread(target=httpd.serve_forever, daemon=True).start()
        yield Here
        httpd.shutdown()


def drive(server: type[Answers], folder: Path, seconds: float, **workload: object) -> Load:
    load = Load(Workload(duration_s=seconds, **workload), server.url, folder)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    time.sleep(seconds)
    load.stop()
    return load


def test_o18_latencies_come_out_exact_not_rounded(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.147, 0.449, 0.451)
    rows = drive(server, tmp_path, 4.0, users=1).rows()
    for k, delay_s in enumerate(server.delays_s):
        seen_s = rows["e2e_s"].iloc[k::3].median()
        assert seen_s == pytest.approx(delay_s, abs=0.02)
        assert seen_s != round(seen_s, 2)
    assert measures.identity_error_s(rows).max() < 0.002


def test_o19_one_failed_request_is_a_row_and_not_a_failed_run(
    server: type[Answers], tmp_path: Path
) -> None:
    server.status_every, server.delays_s = (503, 10), (0.01,)
    load = drive(server, tmp_path, 2.0, users=1)
    rows = load.rows()
    assert rows["outcome"].value_counts(normalize=True)["rejected"] == pytest.approx(0.1, abs=0.01)
    assert load._process.returncode == 0
    assert rows["error"].dropna().str.contains("text").any()


def test_o20_users_follow_the_plan_to_the_fraction_of_a_second(
    server: type[Answers], tmp_path: Path
) -> None:
    server.delays_s = (0.02,)
    stages = (Stage(at_s=1.0, users=20), Stage(at_s=1.5, users=2), Stage(at_s=2.95, users=0))
    load = Load(Workload(users=4, stages=stages, duration_s=3.0), server.url, tmp_path)  # type: ignore[attr-defined]
    t0_s = time.monotonic()
    load.begin(t0_s)
    for stage in stages:
        time.sleep(max(0, t0_s + stage.at_s - time.monotonic()))
        load.set_users(stage.users, stage.ramp_s)
    time.sleep(max(0, t0_s + 3 - time.monotonic()))
    time.sleep(0.5)
    assert load.status()["users"] == 0
    load.stop()
    rows = load.rows()
    rate = {
        span: rows["sent_s"].between(*span).sum() / (span[1] - span[0])
        for span in ((0.3, 1.0), (1.15, 1.5), (2.0, 2.9))
    }
    low, high, last = rate.values()
    assert high > 2.5 * low
    assert last < 0.75 * low


def test_killed_generator_loses_nothing(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.01,)
    load = Load(Workload(users=4, duration_s=30.0), server.url, tmp_path)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    time.sleep(2)
    os.kill(load.pid, signal.SIGKILL)
    time.sleep(0.3)
    assert not load.alive
    answered = server.count
    rows = read_requests(load.path)
    assert answered - 8 <= len(rows) <= answered
    with pytest.raises(LoadError, match="killed by signal 9"):
        load.set_users(3)
    load.kill()


def test_generator_ends_with_its_parent(server: type[Answers], tmp_path: Path) -> None:
    load = Load(Workload(users=1, duration_s=30.0), server.url, tmp_path)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    time.sleep(0.5)
    assert load._process.stdin
    load._process.stdin.close()  # what the kernel does for a parent that was killed
    load._process.wait(10)
    load.kill()


def test_silent_target_and_full_disk_are_named(server: type[Answers], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nothing answers at http://127\.0\.0\.1:9 \(Connection"):
        Load(Workload(), "http://127.0.0.1:9", tmp_path)
    (tmp_path / "requests.csv").symlink_to("/dev/full")
    load = Load(Workload(users=1), server.url, tmp_path)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    load._process.wait(10)
    assert "No space left on device" in load.last_words()
    load.kill()


def test_an_app_that_does_not_tell_its_parts_still_has_its_latency(
    server: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "do_POST", lambda self: (self.rfile.read(
        int(self.headers["Content-Length"])), self._send(200, b"hello")))  # fmt: skip
    rows = drive(server, tmp_path, 1.0, users=1).rows()
    assert set(rows["outcome"]) == {"ok"}
    assert rows["e2e_s"].gt(0).all()
    assert rows["inference_s"].isna().all()
    assert rows["error"].str.contains("X-Served-By").all()


def test_users_who_give_up_are_timeouts(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.6,)
    rows = drive(server, tmp_path, 2.0, users=1, timeout_s=0.3).rows()
    assert set(rows["outcome"]) == {"timeout"}
