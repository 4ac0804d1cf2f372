"""Ray in this process, on loopback: started clean, stopped whole, whatever happens in between."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from collections import deque
from typing import Any

from kit import leftovers
from kit.settings import Settings

LOOPBACK = "127.0.0.1"
# Ray replaces 127.0.0.1 by the address of the network card; its other loopback ones it keeps.
NODE_IP = "127.0.0.2" if sys.platform == "linux" else LOOPBACK

said: deque[str] = deque(maxlen=50)
"""What Ray wanted to tell whoever started it, the newest last."""
_watchdog: subprocess.Popen[bytes] | None = None
_METRICS_INTERVAL_MS = "RAY_metrics_report_interval_ms"


class ServingError(RuntimeError):
    """Serve could not do what was asked; the text says why and what still runs."""


def start_ray(settings: Settings, port: int, num_cpus: int | None) -> str:
    """Start Ray with what `settings` fix at the start; returns the URL of its dashboard.

    Raises:
        ServingError: when Ray runs in this process already, Locust was imported into it, or
            Serve's `port` is taken.
    """
    global _watchdog
    import ray

    if ray.is_initialized():
        raise ServingError(
            "Ray already runs in this process, started by something else: call ray.shutdown() "
            "first, or kit.attach(dashboard_url) to use it as it is"
        )
    if "locust" in sys.modules:
        raise ServingError(
            "locust was imported in this process: it replaces sockets and threads by gevent's, and "
            "Ray hangs on them. Restart the kernel; the kit runs Locust in a process of its own"
        )
    leftovers.stop_all()
    check_port(port)
    # Ray 2.60.0 pushes every metrics_interval_s and never reads these two; its deprecation note
    # says that later releases will, so both are set.
    for side in ("REPLICA", "HANDLE"):
        name = f"RAY_SERVE_{side}_AUTOSCALING_METRIC_PUSH_INTERVAL_S"
        os.environ[name] = str(settings.metrics_interval_s)
    # By default Ray's processes hand over their metrics every 10 s, for which each run would wait.
    os.environ.setdefault(_METRICS_INTERVAL_MS, "2000")
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1" if settings.proxy == "haproxy" else "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # torch warns of the pynvml alias in every worker that imports it; this one text only.
    os.environ.setdefault("PYTHONWARNINGS", "ignore:The pynvml package is deprecated:FutureWarning")
    context = ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        _node_ip_address=NODE_IP,
        log_to_driver=False,  # Ray's log thread would write into whichever cell called this
        logging_level="warning",
    )
    # Whatever log_to_driver says, a thread prints Ray's own warnings, into the cell that called this.
    ray._private.worker.print_to_stdstream = _hear
    leftovers.record()
    _watchdog = leftovers.watch()
    atexit.register(stop_ray)
    return f"http://{context.dashboard_url}"


def _hear(data: dict[str, Any], ignore_prefix: bool) -> None:
    said.extend(str(line).strip() for line in data["lines"])


def metrics_interval_s() -> float:
    """How often Ray's processes hand over their metrics where this process started Ray."""
    return max(1.0, float(os.environ[_METRICS_INTERVAL_MS]) / 1e3)  # Ray does not go below


def stop_ray() -> None:
    """Stop the Ray of this process; quiet when there is none."""
    global _watchdog
    import ray

    if ray.is_initialized():
        ray.shutdown()
    leftovers.forget()
    if _watchdog is not None:
        _watchdog.communicate()
        _watchdog = None


def check_port(port: int, patience_s: float = 5.0) -> None:
    """A port of a cluster that is just going down comes free within seconds."""
    deadline = time.monotonic() + patience_s
    while True:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind((LOOPBACK, port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise ServingError(
                        f"port {port} is taken ({error.strerror}) by {leftovers.holder(port)}: stop "
                        f"that, or choose another with start(port=…)"
                    ) from None
        time.sleep(0.2)
