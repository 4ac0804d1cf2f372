"""A Locust process as a value: start it, change its users, stop it, read its rows."""

from __future__ import annotations

import contextlib
import json
import os
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
from kit.workload import Workload

READY_S = 60.0
DRAIN_S = 5.0


class LoadError(RuntimeError):
    """The load generator could not start or died; the text says why."""


class Load:
    """One headless Locust in its own process group, writing rows to a CSV file.

    Args:
        workload: what to send.
        url: where the app answers.
        folder: takes `requests.csv`, after the rows that are there, and Locust's own log, `load.log`.
        first_request: number of the first request; each number has a prompt of its own.

    Raises:
        LoadError: when nothing answers at `url`, or Locust does not come up.
    """

    def __init__(self, workload: Workload, url: str, folder: Path, first_request: int = 0) -> None:
        _check(url)
        self.path = folder / "requests.csv"
        self._log_path = folder / "load.log"
        self._state: dict[str, Any] = {"users": 0, "in_flight": 0, "t_s": time.monotonic()}
        self._ready = threading.Event()
        self._workload = workload
        if not self.path.exists():
            self.path.write_text(",".join(REQUEST_COLUMNS) + "\n")
        deadline_s = workload.duration_s + READY_S + DRAIN_S + workload.timeout_s
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "locust", "-f", str(Path(__file__).parent / "locustfile.py"),
                 "--headless", "--host", url, "--users", "1", "--spawn-rate", "1000",
                 "--run-time", f"{deadline_s:.0f}s", "--stop-timeout", f"{DRAIN_S:.0f}",
                 "--exit-code-on-error", "0", "--only-summary"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={**os.environ, "KIT_WORKLOAD": workload.model_dump_json(),
                     "KIT_REQUESTS": str(self.path), "KIT_FIRST_REQUEST": str(first_request),
                     "PYTHONUNBUFFERED": "1"},
                cwd=folder,
            )  # fmt: skip
        leftovers.record([self._process.pid])
        self._reader = threading.Thread(target=self._listen, name="kit-load", daemon=True)
        self._reader.start()
        if not self._ready.wait(READY_S) or self._process.poll() is not None:
            self.kill()
            raise LoadError(f"Locust did not start: {self.last_words()}")

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, t0_s: float) -> None:
        """Let the users go; rows count seconds from `t0_s` on the monotonic clock."""
        self._send(t0_s=t0_s, users=self._workload.users)

    def set_users(self, users: int, ramp_s: float = 0.0) -> None:
        """Change the number of users, at once or evenly within `ramp_s` seconds.

        Raises:
            LoadError: when Locust is gone.
        """
        self._send(users=users, ramp_s=ramp_s)

    def set_workload(self, workload: Workload) -> None:
        """Change what the next requests are like; users, `kind` and `timeout_s` stay.

        Raises:
            LoadError: when Locust is gone.
        """
        self._send(workload=workload.model_dump(mode="json"))
        self._workload = workload

    def status(self) -> dict[str, Any]:
        """Last word of the process: `t_s` (monotonic), `users`, requests `in_flight`."""
        return dict(self._state)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def stop(self) -> None:
        """End the load: requests under way may finish within `DRAIN_S`, then they are cut."""
        if self.alive:
            with contextlib.suppress(LoadError, subprocess.TimeoutExpired):
                self._send(stop=True)
                self._process.wait(DRAIN_S + 5)
        self.kill()

    def kill(self) -> None:
        """End the process at once. Its exit code says nothing: any failed request sets it."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe:
                with contextlib.suppress(OSError):
                    pipe.close()

    def rows(self) -> pd.DataFrame:
        """All rows so far, see `read_requests`."""
        return read_requests(self.path)

    def _send(self, **command: Any) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except (OSError, ValueError):
            raise LoadError(f"the load generator is gone: {self.last_words()}") from None

    def _listen(self) -> None:
        assert self._process.stdout
        for line in self._process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("event") == "ready":
                self._ready.set()
            elif "users" in message:
                self._state = message
        self._ready.set()

    def last_words(self) -> str:
        code = self._process.poll()
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        how = f"killed by signal {-code}" if code and code < 0 else f"exit code {code}"
        return f"{how}; {' / '.join(lines[-3:]) or 'it said nothing'} (log: {self._log_path.name})"


def read_requests(path: Path) -> pd.DataFrame:
    """A requests.csv as a table, in order of sending; a last line cut by a kill is left out."""
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    types = {c: "str" if c in TEXT_COLUMNS else "float64" for c in REQUEST_COLUMNS}
    table = pd.read_csv(StringIO(whole), dtype=types, keep_default_na=False, na_values=[""])
    return table.sort_values("sent_s", kind="stable", ignore_index=True)


def _check(url: str) -> None:
    """Any HTTP answer will do; silence is an error now rather than a run without rows."""
    try:
        requests.get(f"{url}/-/healthz", timeout=5)
    except requests.RequestException as error:
        cause = type(error).__name__
        raise LoadError(
            f"nothing answers at {url} ({cause}): is the app deployed, and is this its address?"
        ) from None
