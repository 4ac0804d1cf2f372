"""Ends the processes of a vLLM engine when their owner was killed: they would run on for ever.

vLLM's engine process does not notice that the process which started it is gone, and after a `kill
-9` nobody is left there to tell it. So a small process of its own waits beside it, on a pipe that
closes when the owner dies, however it dies. Run as a script, it imports nothing of the kit.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

LOOK_EVERY_S = 1.0


def watch_over_this_process() -> subprocess.Popen[bytes]:
    """Start the guard of this process; closing its `stdin` ends it, and what it guards."""
    return subprocess.Popen(
        [sys.executable, "-IS", __file__, str(os.getpid())], stdin=subprocess.PIPE
    )


def _engines(owner: int) -> set[int]:
    """Processes that `owner` started and that are, or will become, engines of vLLM."""
    found = set()
    for task in Path(f"/proc/{owner}/task").glob("*/children"):
        # A thread or a child may end while it is looked at.
        with contextlib.suppress(OSError):
            for pid in task.read_text().split():
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if command.startswith(b"VLLM::") or b"spawn_main" in command:
                    found.add(int(pid))
    return found


def _guard(owner: int) -> None:
    engines: set[int] = set()
    while not select.select([0], [], [], LOOK_EVERY_S)[0]:
        engines = _engines(owner) or engines
    for pid in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    # The signals that end the owner's group must not end its guard first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _guard(int(sys.argv[1]))
