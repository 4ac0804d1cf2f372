"""A message broker on this machine as a value: redis-server on a Unix socket, started and stopped.

It listens on no network at all: its socket lies in a folder that only this user can enter, so it
needs no password. Every accepted write is on disk before it is answered (append-only file), so a
broker started again on the same folder has lost nothing. `KIT_BROKER_URL` names another Redis.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

from kit import leftovers

BROKER_URL = "KIT_BROKER_URL"
"""Environment variable that names a Redis to use instead of one of our own."""
_SOCKET_SCHEME = "redis+socket://"


class BrokerError(RuntimeError):
    """There is no broker; the text says why and what to do."""


class Broker:
    """A redis-server of our own, or one that was named. Made by `start` and `named`."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None, made: list[Path]) -> None:
        self.url = url
        self.process = process
        self._made = made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End what `start` started, and remove the folders it made; a named broker is left alone."""
        atexit.unregister(self.stop)
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)


def connect(url: str, patience_s: float = 2.0) -> redis.Redis:
    """A client for a broker's `url`; a broker that is away is waited for, `patience_s` at most."""
    url = url.replace(_SOCKET_SCHEME, "unix://", 1)  # the one scheme that Celery spells otherwise
    pause_s = 0.25
    retry = Retry(ExponentialBackoff(cap=pause_s, base=pause_s), int(patience_s / pause_s))
    return redis.Redis.from_url(url, decode_responses=True, retry=retry)


def named() -> Broker | None:
    """The broker that `KIT_BROKER_URL` names, or None.

    Raises:
        BrokerError: when it does not answer.
    """
    url = os.environ.get(BROKER_URL)
    if not url:
        return None
    try:
        with connect(url) as client:
            client.ping()
    except (redis.RedisError, ValueError) as error:
        at = url.rsplit("@", 1)[-1]  # never its password
        raise BrokerError(
            f"no broker answers at {BROKER_URL} ({at}): {type(error).__name__}. It must be a URL "
            "like redis://host:6379/0, rediss://… or redis+socket:///path of a running Redis"
        ) from None
    return Broker(url, None, [])


def start(folder: Path | None = None, patience_s: float = 30.0) -> Broker:
    """Start a broker that keeps its jobs in `folder`, and wait until it answers.

    Without a folder it gets a new one, which `stop` removes with all that is in it. What a process
    that was killed leaves running is stopped as the rest of it is (`kit.leftovers`).

    Raises:
        BrokerError: when redis-server is missing, does not come up within `patience_s`, or another
            one works on `folder`.
    """
    program = shutil.which("redis-server")
    if program is None:
        raise BrokerError(
            "the job queue needs redis-server, which is not on the PATH: install it (Debian and "
            f"Ubuntu: apt install redis-server), or name a running one in {BROKER_URL}"
        )
    # The path of a socket has 107 bytes at most, so it never goes into a folder given to us.
    private = Path(tempfile.mkdtemp(prefix="kit-broker-"))
    data = folder or private
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    log = private / "log"
    with (data / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            shutil.rmtree(private)
            raise BrokerError(
                f"another broker works on {data}: stop it, or choose another folder"
            ) from None
        socket = private / "socket"
        process = subprocess.Popen(
            [program, "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
             "--dir", str(data), "--appendonly", "yes", "--appendfsync", "always", "--save", "",
             "--maxmemory-policy", "noeviction", "--logfile", str(log)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],  # the lock lives as long as the broker, not as this process
            start_new_session=True,  # an interrupt in the notebook is not for the broker
        )  # fmt: skip
    leftovers.record([process.pid])
    broker = Broker(f"{_SOCKET_SCHEME}{socket}", process, [private])
    atexit.register(broker.stop)
    deadline = time.monotonic() + patience_s
    with connect(broker.url, 0.0) as client:
        while True:
            try:
                client.ping()
                return broker
            except redis.RedisError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    said = log.read_text()[-400:] if log.exists() else ""
                    broker.stop()
                    raise BrokerError(f"redis-server does not answer: {error}. {said}") from None
            time.sleep(0.02)
