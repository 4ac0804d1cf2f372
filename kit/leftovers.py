"""Processes that a killed run leaves behind: written down when started, found and stopped later.

A record lists process ids with their start times, so that a reused id is never taken for ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


def record(processes: Iterable[tuple[object, Any]], owner: int | None = None) -> None:
    """Write down processes as (name, process), owned by this process unless `owner` is given."""
    owner = owner or os.getpid()
    pids = [owner, *(p.pid for _, p in processes)]
    _folder().mkdir(mode=0o700, exist_ok=True)
    path = _folder() / f"{owner}.json"
    known = dict(_read(path))
    path.write_text(json.dumps(known | {p: _started_s(p) for p in pids}))


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
