"""JupyterLab started exactly as people start it, by `make lab`, and ended with all that came of it."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import requests

ROOT = Path(__file__).parents[1]
MARK = "KIT_LAB"
"""The environment variable that names a process as descended from one JupyterLab or its browser."""


@dataclass(frozen=True)
class Server:
    """A JupyterLab that answers; the token stays in the session."""

    url: str
    api: requests.Session
    notebooks: Path
    mark: str


def descended(mark: str) -> dict[int, str]:
    """Process id and command of all that carry the mark, whoever is their parent now."""
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found[process.pid] = " ".join(process.cmdline())[:120]
    return found


@contextmanager
def jupyterlab(folder: Path, port: int = 0) -> Iterator[Server]:
    """`make lab` on a copy of the notebooks in `folder / "notebooks"`; port 0 takes a free one.

    Raises RuntimeError when it does not answer within a minute, and when a process outlives it: what
    a notebook starts has to end with its kernel.
    """
    notebooks = folder / "notebooks"
    shutil.copytree(ROOT / "notebooks", notebooks, ignore=shutil.ignore_patterns(".*"))
    mark, token = secrets.token_hex(8), secrets.token_hex(16)
    # The person's own JupyterLab (settings, layout, history) is neither read nor changed.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "MAKE", "MFLAGS"))}
    places = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
    places += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
    env |= {name: str(folder / name.lower()) for name in places}
    env |= {"JUPYTER_TOKEN": token, MARK: mark, "PYTHONPATH": str(ROOT)}
    news = Path(env["JUPYTERLAB_SETTINGS_DIR"], "@jupyterlab/apputils-extension")
    news.mkdir(parents=True)
    (news / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    if port == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
    # What is tested is installed, so the setup that `make lab` begins with is taken as done.
    command = ["make", "--old-file=setup", "lab", f"NOTEBOOKS={notebooks}"]
    command += [f"L=--no-browser --port {port} --ServerApp.port_retries=0"]
    log = folder / "jupyterlab.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        api = _answering(url, token, process, log)
        try:
            yield Server(url, api, notebooks, mark)
        finally:
            with suppress(requests.RequestException):  # a server that died has no kernels to end
                shutdown_kernels(url, api)
    finally:
        _end(process, mark)


def shutdown_kernels(url: str, api: requests.Session) -> None:
    """End every kernel as JupyterLab's own menu does, and wait until they are gone."""
    for kernel in api.get(f"{url}/api/kernels", timeout=10).json():
        api.delete(f"{url}/api/kernels/{kernel['id']}", timeout=60)


def _answering(
    url: str, token: str, process: subprocess.Popen[bytes], log: Path
) -> requests.Session:
    """A session that is logged in, as soon as JupyterLab answers."""
    api = requests.Session()
    api.headers["Authorization"] = f"token {token}"
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        try:
            if api.get(f"{url}/lab", timeout=10).ok:
                return api
        except requests.RequestException:
            time.sleep(0.2)
    raise RuntimeError(f"`make lab` does not answer:\n{log.read_text()[-2000:]}")


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End the server; end what is left 15 s later too, and say so."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(30)
    until_s = time.monotonic() + 15
    while (left := descended(mark)) and time.monotonic() < until_s:
        time.sleep(0.1)
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if left:
        raise RuntimeError(f"still running after JupyterLab ended, now killed: {left}")
