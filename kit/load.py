"""Locust as a value: start it, change its users or its rate, stop it, read its rows."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pandas as pd
import requests

from kit import leftovers
from kit.rows import REQUEST_COLUMNS, TEXT_COLUMNS
from kit.workload import Workload, join_at

READY_S = 60.0
REMOTE_S = 600.0
DRAIN_S = 5.0
LEAD_S = 0.4
"""How long Locust takes to start its users, once told."""
LOCUSTFILE = Path(__file__).with_name("locustfile.py")


class LoadError(RuntimeError):
    """The load generator could not start or died; the text says why."""


class Load:
    """One headless Locust, or a master with workers, writing rows to a CSV file.

    Args:
        workload: what to send, and by how many processes.
        url: where the app answers.
        folder: takes `requests.csv`, after the rows that are there, and Locust's own log, `load.log`.
        first_request: number of the first request; each number has a prompt of its own.
        run: a number below 2³² that makes this run's prompts differ from those of others.

    Raises:
        LoadError: when nothing answers at `url`, or Locust does not come up.
    """

    def __init__(
        self, workload: Workload, url: str, folder: Path, first_request: int = 0, run: int = 0
    ) -> None:
        _check(url)
        self.path = folder / "requests.csv"
        self._log_path = folder / "load.log"
        self._state: dict[str, Any] = {"in_flight": 0, "t_s": time.monotonic()}
        if not workload.open_loop:
            self._state["users"] = 0
        self._ready = threading.Event()
        self._workload = workload
        self._first_request, self._run = first_request, run
        self._processes: list[subprocess.Popen[bytes]] = []
        if not self.path.exists():
            self.path.write_text(",".join(REQUEST_COLUMNS) + "\n")
        self._log_path.write_bytes(b"")
        self._start(url, folder)
        self._reader = threading.Thread(target=self._listen, name="kit-load", daemon=True)
        self._reader.start()
        wait_s = REMOTE_S if workload.remote_workers else READY_S
        if not self._ready.wait(wait_s) or not self.alive:
            self.kill()
            raise LoadError(f"Locust did not start: {self.last_words()}")

    def _start(self, url: str, folder: Path) -> None:
        w = self._workload
        deadline_s = w.duration_s + READY_S + DRAIN_S + w.timeout_s
        main = [
            "--headless", "--host", url, "--users", "1", "--spawn-rate", "1000",
            "--run-time", f"{deadline_s:.0f}s", "--stop-timeout", f"{DRAIN_S:.0f}",
            "--exit-code-on-error", "0", "--only-summary",
        ]  # fmt: skip
        workers = w.processes if w.processes > 1 or w.remote_workers else 0
        if not workers:
            self._run_locust(main, folder)
            return
        host, port = join_at(w.join_address)
        port = port or _free_port(host)
        count = workers + w.remote_workers
        self._run_locust(
            [*main, "--master", "--master-bind-host", host, "--master-bind-port", str(port),
             "--expect-workers", str(count)], folder,
        )  # fmt: skip
        for _ in range(workers):
            self._run_locust(worker_options(host, port), folder)
        if w.remote_workers:
            print(
                f"load: waiting for {w.remote_workers} workers on other machines; start on each: "
                f"python -m kit.worker {host}:{port}"
            )

    def _run_locust(self, options: list[str], folder: Path) -> None:
        main = not self._processes
        with self._log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), *options],
                stdin=subprocess.PIPE if main else subprocess.DEVNULL,
                stdout=subprocess.PIPE if main else log,
                stderr=log, start_new_session=True, cwd=folder,
                env={**os.environ, "KIT_REQUESTS": str(self.path), "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._processes.append(process)
        leftovers.record([process.pid])

    @property
    def pid(self) -> int:
        return self._processes[0].pid

    def begin(self, t0_s: float, plan_s: float = 0.0) -> None:
        """Let the users go, or the plan begin.

        Args:
            t0_s: what rows count seconds from, monotonic; `LEAD_S` ahead, so that nobody is late.
            plan_s: when a plan of arrivals begins on the rows' clock.
        """
        self._t0_s = t0_s
        self._send(
            t0_s=t0_s, plan_s=plan_s, users=self._workload.users, first=self._first_request,
            run=self._run, workload=self._workload.model_dump(mode="json"),
        )  # fmt: skip

    def set_users(self, users: int, ramp_s: float = 0.0) -> None:
        """Change the number of users, at once or evenly within `ramp_s` seconds.

        Raises:
            LoadError: when Locust is gone.
        """
        self._send(users=users, ramp_s=ramp_s)

    def set_rate(self, rate_rps: float, ramp_s: float = 0.0) -> None:
        """Change the rate of a plan, at once or evenly within `ramp_s` seconds; of a trace, how many
        times faster than recorded it is sent. Later stages of the plan are dropped.

        Raises:
            LoadError: when Locust is gone.
        """
        # Processes that share the plan must turn off at the same place of it.
        at_s = time.monotonic() - self._t0_s + (0.1 if len(self._processes) > 1 else 0.0)
        self._send(rate=rate_rps, ramp_s=ramp_s, at_s=at_s)

    def set_workload(self, workload: Workload) -> None:
        """Change what the next requests are like; users, their plan, `kind` and `timeout_s` stay.

        Raises:
            LoadError: when Locust is gone.
        """
        self._send(workload=workload.model_dump(mode="json"))
        self._workload = workload

    def status(self) -> dict[str, Any]:
        """Last word of Locust: `t_s` (monotonic) and, as the sampler names them, its figures.

        `in_flight` requests, `in_flight_s` their ∫ dt, `cpu_share` of a core that its busiest process
        takes; `users` or, with a plan, `rate_rps`, `planned_requests` and `sent_requests`. Counts and
        integrals are since the beginning.
        """
        return dict(self._state)

    @property
    def alive(self) -> bool:
        return all(p.poll() is None for p in self._processes)

    def stop(self) -> None:
        """End the load: requests under way may finish within `DRAIN_S`, then they are cut."""
        if self.alive:
            with contextlib.suppress(LoadError, subprocess.TimeoutExpired):
                self._send(stop=True)
                for process in self._processes:
                    process.wait(DRAIN_S + 5)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Its exit code says nothing: any failed request sets it."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._reader.join(5)
        for pipe in (self._processes[0].stdin, self._processes[0].stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def rows(self) -> pd.DataFrame:
        """All rows so far, see `read_requests`."""
        return read_requests(self.path)

    def _send(self, **command: Any) -> None:
        stdin = self._processes[0].stdin
        assert stdin
        try:
            stdin.write(json.dumps(command).encode() + b"\n")
            stdin.flush()
        except (OSError, ValueError):
            raise LoadError(f"the load generator is gone: {self.last_words()}") from None

    def _listen(self) -> None:
        stdout = self._processes[0].stdout
        assert stdout
        for line in stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("event") == "ready":
                self._ready.set()
            elif "in_flight" in message:
                self._state = message
        self._ready.set()

    def last_words(self) -> str:
        # Of several the one that went first: the others are ended after it.
        codes = [c for p in self._processes if (c := p.poll()) is not None]
        code = codes[0] if codes else None
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
        return f"{how}; {' / '.join(lines[-3:]) or 'it said nothing'} (log: {self._log_path.name})"


def read_requests(path: Path) -> pd.DataFrame:
    """A requests.csv as a table, in order of sending; a last line cut by a kill is left out."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    types = {c: "str" if c in TEXT_COLUMNS else "float64" for c in REQUEST_COLUMNS}
    table = pd.read_csv(StringIO(whole), dtype=types, keep_default_na=False, na_values=[""])
    table = table.reindex(columns=list(REQUEST_COLUMNS))  # older runs have fewer
    return table.sort_values("sent_s", kind="stable", ignore_index=True)


def worker_options(host: str, port: int) -> list[str]:
    """What makes a Locust a worker of the master there."""
    return ["--worker", "--master-host", host, "--master-port", str(port)]


def _free_port(host: str) -> int:
    with socket.socket() as s:
        try:
            s.bind((host, 0))
        except OSError as error:
            raise LoadError(f"no port of {host} can be had: {error.strerror}") from None
        return int(s.getsockname()[1])


def _check(url: str) -> None:
    """Any HTTP answer will do; silence is an error now rather than a run without rows."""
    try:
        requests.get(f"{url}/-/healthz", timeout=5)
    except requests.RequestException as error:
        cause = type(error).__name__
        raise LoadError(
            f"nothing answers at {url} ({cause}): is the app deployed, and is this its address?"
        ) from None
