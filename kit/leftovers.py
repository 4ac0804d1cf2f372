"""Processes that a killed run leaves behind: written down when started, found and stopped later.

A record lists process ids with their start times, so that a reused id is never taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import psutil


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"serve-tuning-kit-{os.getuid()}"


def _started_s(pid: int) -> float | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    return None


def me() -> tuple[int, float | None]:
    """This process: its id and start time."""
    return os.getpid(), _started_s(os.getpid())


def alive(pid: int, started_s: float | None) -> bool:
    """Whether that very process still runs."""
    return started_s is not None and _started_s(pid) == started_s


def record(pids: Iterable[int] | None = None, owner: int | None = None) -> None:
    """Write down what this process (or `owner`) started: by default all it has started so far."""
    owner = owner or os.getpid()
    if pids is None:
        pids = [p.pid for p in psutil.Process(owner).children(recursive=True)]
    _folder().mkdir(mode=0o700, exist_ok=True)
    path = _folder() / f"{owner}.json"
    path.write_text(json.dumps(_read(path) | {p: _started_s(p) for p in [owner, *pids]}))


def watch() -> subprocess.Popen[bytes]:
    """A process that stops what is recorded as soon as this one is gone, however it went.

    Closing its stdin ends it.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "kit.leftovers"], stdin=subprocess.PIPE, start_new_session=True
    )


def forget() -> None:
    """Drop this process's record."""
    (_folder() / f"{os.getpid()}.json").unlink(missing_ok=True)


def _read(path: Path) -> dict[int, float | None]:
    with contextlib.suppress(OSError, ValueError):
        return {int(pid): at for pid, at in json.loads(path.read_text()).items()}
    return {}


def stop_all() -> list[int]:
    """Stop what recorded owners left when they died, with all children. Returns the ids stopped."""
    stopped = []
    for path in _folder().glob("*.json"):
        known = _read(path)
        owner = int(path.stem)
        left = {p for p, at in known.items() if alive(p, at)}
        if owner in left:
            continue
        doomed: list[psutil.Process] = []
        for pid in left:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                doomed += [*process.children(recursive=True), process]
        for process in doomed:
            with contextlib.suppress(psutil.Error):
                process.kill()
                stopped.append(process.pid)
        psutil.wait_procs(doomed, timeout=5)
        path.unlink(missing_ok=True)
    return stopped


def holder(port: int) -> str:
    """Who listens on a port, in words."""
    with contextlib.suppress(psutil.Error):
        for c in psutil.net_connections("tcp"):
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid:
                return f"process {c.pid} ({' '.join(psutil.Process(c.pid).cmdline())[:80]})"
    return "another process"


if __name__ == "__main__":
    sys.stdin.buffer.read()  # ends when the process at the other end does
    stop_all()
