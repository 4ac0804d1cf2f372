"""The load generator: real Locust against a small server of known behaviour, no Ray."""

from __future__ import annotations

import http.server
import importlib.util
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import kit
from kit import breakdown, measures
from kit.clock import SERVED_BY, clock_id
from kit.load import Load, LoadError, read_requests
from kit.workload import Stage, Workload

pytestmark = pytest.mark.cluster


class Answers(http.server.BaseHTTPRequestHandler):
    """Sleeps `delays_s` in turn; answers as the apps do, or with `status`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # headers and body in one packet: no wait for an acknowledgement
    delays_s: tuple[float, ...] = (0.0,)
    status_every: tuple[int, int] = (200, 1)
    retry_after: str | None = None
    bare = False  # as a server without the kit's headers
    gaps_s: tuple[float, ...] = (0.02, 0.04, 0.02)  # between the tokens of a stream
    cut_after: int | None = None  # tokens, then the connection breaks
    count = 0
    seen: list[tuple[str, bytes]]
    left: list[int]  # tokens written to each stream whose client went away
    told: dict[int, list[float]]  # when each stream was asked for, and each of its tokens written

    def do_GET(self) -> None:
        self._send(200, b"{}")

    def do_POST(self) -> None:
        self.arrived_s = time.monotonic()
        body = self.rfile.read(int(self.headers["Content-Length"]))
        cls = type(self)
        number, cls.count = cls.count, cls.count + 1
        cls.seen.append((self.path, body))
        time.sleep(self.delays_s[number % len(self.delays_s)])
        status, every = self.status_every
        if (number + 1) % every == 0 and status != 200:
            more = {"Retry-After": self.retry_after} if self.retry_after else {}
            self._send(status, b'{"error": {"message": "full"}}', more)
        elif self.path == "/v1/completions" and json.loads(body).get("stream"):
            self._stream(number)
        else:
            usage = {"prompt_tokens": 1, "completion_tokens": 1}
            answer = {"choices": [{"text": "a", "finish_reason": "length"}], "usage": usage}
            self._send(200, json.dumps(answer).encode(), self._timing(number))

    def _timing(self, number: int) -> dict[str, str]:
        if self.bare:
            return {}
        inside_ms = 1e3 * (time.monotonic() - self.arrived_s)
        return {
            "Server-Timing": "batch_wait;dur=0, engine_queue;dur=0, prefill;dur=0, "
            f"decode;dur={inside_ms}, postprocess;dur=0",
            SERVED_BY: f"r1 {number} 1 {clock_id()} {self.arrived_s} {time.monotonic()} long",
        }

    def _stream(self, number: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        sent, told = 0, [self.arrived_s]
        self.told[number] = told
        try:
            for gap_s in (0.0, *self.gaps_s):
                time.sleep(gap_s)
                told.append(time.monotonic())
                self._event({"choices": [{"text": "a ", "finish_reason": None}]})
                sent += 1
                if sent == self.cut_after:
                    self.connection.shutdown(socket.SHUT_RDWR)
                    return
            timing = self._timing(number)
            end: dict[str, object] = {"choices": [{"text": "", "finish_reason": "length"}]}
            self._event(end)
            time.sleep(0.05)  # a late usage chunk must not count as a token
            # Each piece holds two tokens: chunks are not tokens.
            usage = {"prompt_tokens": 7, "completion_tokens": 2 * sent}
            of_kit = {} if self.bare else {"kit": {
                "server_timing": timing["Server-Timing"], "served_by": timing[SERVED_BY]}}  # fmt: skip
            self._event({"choices": [], "usage": usage} | of_kit)
            self._event("[DONE]")
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            type(self).left.append(sent)

    def _event(self, data: object) -> None:
        text = data if isinstance(data, str) else json.dumps(data)
        line = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ((headers or {}) | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 128  # by default 5: connections beyond wait a second to try again


@pytest.fixture
def server() -> Iterator[type[Answers]]:
    class Here(Answers):
        url = ""
        seen: list[tuple[str, bytes]] = []
        left: list[int] = []
        told: dict[int, list[float]] = {}

    with Server(("127.0.0.1", 0), Here) as httpd:
        Here.url = f"http://127.0.0.1:{httpd.server_port}"
        # Looks for its end every 20 ms, not twice a second.
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        yield Here
        httpd.shutdown()


def drive(
    server: type[Answers], folder: Path, seconds: float, at_least: int = 0, **workload: object
) -> Load:
    """Load for some seconds, longer where a busy machine has not had `at_least` requests by then."""
    before = server.count
    load = Load(Workload(duration_s=seconds, **workload), server.url, folder)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    time.sleep(seconds)
    deadline_s = time.monotonic() + 60
    while server.count - before < at_least and time.monotonic() < deadline_s:
        time.sleep(0.05)
    load.stop()
    return load


def test_o18_latencies_come_out_exact_not_rounded(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.147, 1.449, 1.451)
    rows = drive(server, tmp_path, 3.0, 10, arrivals="constant", rate_rps=8.0).rows()
    for k, delay_s in enumerate(server.delays_s):
        # Against what the server itself took: a busy machine wakes it late.
        mine = rows[rows["batch_id"] % 3 == k]
        assert mine["decode_s"].min() >= delay_s
        late_s = mine["e2e_s"] - mine["decode_s"]  # on the way, or because the client slept
        assert 0 <= late_s.min() <= late_s.median() < 0.02
        assert mine["e2e_s"].median() == pytest.approx(delay_s, abs=0.02)
        seen_s = mine["e2e_s"].median()
        assert seen_s != round(seen_s, 2)
    assert measures.identity_error_s(rows).median() < 0.0005
    assert measures.identity_error_s(rows).max() < 0.002


def test_o19_one_failed_request_is_a_row_and_not_a_failed_run(
    server: type[Answers], tmp_path: Path
) -> None:
    server.status_every, server.delays_s = (503, 10), (0.01,)
    load = drive(server, tmp_path, 2.0, 20, users=1)
    rows = load.rows()
    assert len(rows) == server.count > 10
    assert (rows["outcome"] == "rejected").sum() == server.count // 10
    assert load._processes[0].returncode == 0
    assert rows["error"].dropna().str.contains("full").any()
    assert rows["attempt"].eq(1).all()


def test_o20_users_follow_the_plan_to_the_fraction_of_a_second(
    server: type[Answers], tmp_path: Path
) -> None:
    server.delays_s = (0.1,)
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
    # Users without pauses are always in a request, however slow the machine: Little's law.
    spans = ((0.3, 1.0), (1.15, 1.5), (2.0, 2.9))
    low, high, last = (_in_flight(rows, *span) for span in spans)
    assert low == pytest.approx(4, rel=0.15)
    assert high > 2.5 * low
    assert last < 0.75 * low


def _in_flight(rows: pd.DataFrame, start_s: float, end_s: float) -> float:
    """Mean number of requests under way within a span."""
    inside_s = measures.finished_s(rows).clip(upper=end_s) - rows["sent_s"].clip(lower=start_s)
    return float(inside_s.clip(lower=0).sum() / (end_s - start_s))


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
    assert load._processes[0].stdin
    load._processes[0].stdin.close()  # what the kernel does for a parent that was killed
    load._processes[0].wait(10)
    load.kill()


def test_silent_target_and_full_disk_are_named(server: type[Answers], tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"nothing answers at http://127\.0\.0\.1:9 \(Connection"):
        Load(Workload(), "http://127.0.0.1:9", tmp_path)
    (tmp_path / "requests.csv").symlink_to("/dev/full")
    load = Load(Workload(users=1), server.url, tmp_path)  # type: ignore[attr-defined]
    load.begin(time.monotonic())
    load._processes[0].wait(10)
    assert "No space left on device" in load.last_words()
    load.kill()


STREAM: dict[str, object] = {"users": 2, "stream": True, "prompt_tokens": 7, "output_tokens": 8}


def test_a_stream_is_timed_token_by_token(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.1,)
    rows = measures.ok(drive(server, tmp_path, 2.0, 16, **STREAM).rows())
    assert len(rows) > 8
    # What the server saw of itself: a busy machine wakes it late.
    told = pd.DataFrame([server.told[int(k)] for k in rows["batch_id"]])
    assert (told.diff(axis=1).min()[1:] >= (0.1, *server.gaps_s)).all()
    written_s = told.sub(told[0], axis=0)[[1, 2, 3, 4]].to_numpy()
    gaps_s = rows["itl_ms"].str.split(expand=True).astype(float).to_numpy() / 1e3
    ttft_s = rows["ttft_s"].to_numpy()[:, None]
    read_s = np.hstack([ttft_s, ttft_s + gaps_s.cumsum(axis=1)])
    late_s = (read_s - written_s).min(axis=0)  # the least is the way alone
    assert ((late_s > -1e-4) & (late_s < 0.02)).all(), late_s
    assert np.diff(late_s) == pytest.approx([0, 0, 0], abs=0.005)
    assert np.median(ttft_s) == pytest.approx(0.1, abs=0.02)
    assert rows["e2e_s"].median() == pytest.approx(0.18, abs=0.03)
    assert 1e3 * np.median(gaps_s, axis=0) == pytest.approx([20, 40, 20], abs=5)
    # The usage chunk comes 50 ms after the last token, and is no token.
    assert rows["e2e_s"].to_numpy() == pytest.approx(read_s[:, -1], abs=0.001)
    for row in measures.records(rows):
        assert row["tpot_s"] == pytest.approx((row["e2e_s"] - row["ttft_s"]) / 7, abs=1e-5)
    assert set(rows["output_tokens"]) == {8}
    assert set(rows["prompt_tokens"]) == {7}
    assert set(rows["finish_reason"]) == {"length"}
    assert set(rows["route"]) == {"long"}
    assert measures.identity_error_s(rows).median() < 0.0005
    assert measures.identity_error_s(rows).max() < 0.002
    assert rows["rest_s"].abs().median() < 0.01
    asked = json.loads(server.seen[0][1])
    assert len(asked.pop("prompt").split()) == 7
    assert asked == {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "stream": True,
                     "stream_options": {"include_usage": True}}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_bare_server_gives_latency_and_tokens(
    server: type[Answers], tmp_path: Path, stream: bool
) -> None:
    server.bare, server.delays_s = True, (0.02,)
    rows = measures.ok(drive(server, tmp_path, 1.0, 8, **STREAM | {"stream": stream}).rows())
    assert len(rows) > 5
    assert rows["e2e_s"].gt(0).all()
    assert rows["error"].str.contains("X-Served-By").all()
    assert rows["output_tokens"].gt(0).all()
    assert rows["ttft_s"].notna().all() == stream
    assert rows[list(measures.PARTS)].isna().all().all()


def test_broken_slow_and_abandoned_streams_keep_what_was_measured(
    server: type[Answers], tmp_path: Path
) -> None:
    places = [tmp_path / name for name in ("cut", "slow", "left")]
    for place in places:
        place.mkdir()
    server.cut_after = 2
    cut = drive(server, places[0], 1.0, 20, **STREAM).rows()
    assert set(cut["outcome"]) == {"cut"}
    assert cut["ttft_s"].notna().all()
    gaps_s = [t[2] - t[1] for t in server.told.values()]
    assert cut["itl_ms"].astype(float).median() == pytest.approx(1e3 * np.median(gaps_s), abs=5)
    assert cut["itl_ms"].astype(float).median() == pytest.approx(20, abs=5)

    server.cut_after, server.gaps_s = None, (0.05, 2.0)
    slow = drive(server, places[1], 1.5, 2, **STREAM, timeout_s=0.4).rows()
    assert set(slow["outcome"]) == {"timeout"}
    assert slow["error"].str.contains("0.4 s").all()

    server.gaps_s, server.left[:] = (0.05,) * 6, []
    half = {"leave_after_tokens": 1, "leave_share": 0.5}
    left = drive(server, places[2], 2.0, 12, **STREAM, **half).rows()
    plan = Workload(**STREAM, **half)  # type: ignore[arg-type]
    leaves = left["request"].map(plan.leaves)
    assert leaves.map({True: "left", False: "ok"}).tolist() == left["outcome"].tolist()
    assert 3 < leaves.sum() < len(left) - 3
    gone = left[left["outcome"] == "left"]
    assert gone["ttft_s"].notna().all()
    assert gone["output_tokens"].isna().all()
    assert len(server.left) >= len(gone) - 2  # the server noticed
    assert max(server.left) <= 4


def test_retries_are_rows_and_follow_their_policy(server: type[Answers], tmp_path: Path) -> None:
    server.status_every, server.retry_after, server.delays_s = (429, 2), "1", (0.05,)
    places = [tmp_path / name for name in ("honour", "storm")]
    for place in places:
        place.mkdir()
    rows = drive(server, places[0], 4.0, users=1, retry="honour").rows()
    assert breakdown.demands(rows)["outcome"].iloc[:-1].eq("ok").all()
    again = rows[rows["attempt"] == 2]
    first = rows[rows["request"].isin(again["request"]) & rows["attempt"].eq(1)]
    pause_s = again["sent_s"].to_numpy() - measures.finished_s(first).to_numpy()
    assert len(again) >= 2
    assert ((pause_s >= 1.0) & (pause_s < 1.6)).all()

    server.status_every = (503, 1)
    rows = drive(server, places[1], 1.0, users=1, retry="storm", max_attempts=3).rows()
    whole = rows[rows["request"] < rows["request"].max()]
    assert set(whole["outcome"]) == {"rejected"}
    assert (whole.groupby("request")["attempt"].max() == 3).all()
    pause_s = whole["sent_s"].shift(-1) - measures.finished_s(whole)
    assert pause_s.median() < 0.02


def test_users_who_find_nobody_there_pause_before_they_ask_again(
    server: type[Answers], tmp_path: Path
) -> None:
    server.status_every = (404, 1)
    rows = drive(server, tmp_path, 2.0, users=1).rows()
    assert set(rows["outcome"].iloc[:-1]) == {"invalid"}  # the last may be cut by the end
    pause_s = rows["sent_s"].shift(-1) - measures.finished_s(rows)
    assert len(rows) >= 3
    assert pause_s.min() >= 0.25


def test_images_go_through_the_same_rows(
    server: type[Answers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("kit.images") is None:
        stub = tmp_path / "stub" / "kit"
        stub.mkdir(parents=True)
        home = str(Path(kit.__file__).parent)
        (stub / "__init__.py").write_text(f"__path__.append({home!r})")
        (stub / "images.py").write_text("def image(seed, index): return b'%d.%d' % (seed, index)")
        monkeypatch.setenv("PYTHONPATH", str(stub.parent))
    rows = drive(server, tmp_path, 1.0, users=1, kind="image").rows()
    assert set(rows["outcome"]) == {"ok"}
    assert {path for path, _ in server.seen} == {"/classify"}
    assert len({body for _, body in server.seen}) == len(server.seen)
    assert rows["decode_s"].notna().all()


def test_users_who_give_up_are_timeouts(server: type[Answers], tmp_path: Path) -> None:
    server.delays_s = (0.6,)
    rows = drive(server, tmp_path, 2.0, users=1, timeout_s=0.3).rows()
    assert set(rows["outcome"]) == {"timeout"}
