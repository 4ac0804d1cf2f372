"""The load generator: Locust, headless, in a process of its own. Nothing else imports Locust.

`kit.load` starts it, tells it over stdin how many users to run (a JSON object a line), and reads
its state from stdout. It writes one CSV row for each request at the moment the request ends, so a
kill loses nothing. When stdin closes, because its parent is gone, it stops by itself.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import sys
import time
from typing import Any

import gevent
from gevent.os import tp_read
from locust import FastHttpUser, events, task
from locust.env import Environment

from kit.clock import SERVED_BY, clock_id
from kit.load import REQUEST_COLUMNS
from kit.workload import Lengths, Workload

_SPAWN_PER_S = 1000


class _Session:
    """What the users of this process share."""

    def __init__(self) -> None:
        self.workload = Workload.model_validate_json(os.environ["KIT_WORKLOAD"])
        self.lengths = Lengths(self.workload)
        self.numbers, self.users = itertools.count(), itertools.count()
        self.clock = clock_id()
        self.t0_s = 0.0
        self.in_flight = 0
        self.rows = os.open(os.environ["KIT_REQUESTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, row: dict[str, Any]) -> None:
        line = ",".join(_text(row.get(c)) for c in REQUEST_COLUMNS) + "\n"
        try:
            os.write(self.rows, line.encode())
        except OSError as error:
            # Load whose rows are lost is worth nothing: stop, and let the parent read why.
            print(f"cannot write {os.environ['KIT_REQUESTS']}: {error.strerror}", file=sys.stderr)
            os._exit(1)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}"
    return str(value).translate(_PLAIN)


_PLAIN = str.maketrans({",": ";", "\n": " ", "\r": " ", '"': "'"})
session: _Session


class User(FastHttpUser):
    """Sends one request after the other; thinks in between."""

    default_headers = {"Content-Type": "application/json"}

    def __init__(self, environment: Environment) -> None:
        self.network_timeout = self.connection_timeout = session.workload.timeout_s
        super().__init__(environment)
        self.dice = random.Random(f"{session.workload.seed}.{next(session.users)}")

    def wait_time(self) -> float:
        mean_s = session.workload.think_time_s
        return self.dice.expovariate(1 / mean_s) if mean_s else 0.0

    @task
    def ask(self) -> None:
        index = next(session.numbers)
        prompt_tokens, max_tokens = session.lengths[index]
        body = json.dumps(
            {"prompt": session.workload.prompt(index, prompt_tokens), "max_tokens": max_tokens}
        )
        # What Locust itself measured comes back through its request event.
        context: dict[str, Any] = {}
        row: dict[str, Any] = {"request": index, "prompt_tokens": prompt_tokens}
        session.in_flight += 1
        sent_s = time.monotonic()
        try:
            response = self.client.post("/", data=body, name="/", context={"kit": context})
            finished_s = time.monotonic()
            row |= {"sent_s": sent_s - session.t0_s, "e2e_s": context["e2e_s"]}
            row |= _read(response, sent_s, finished_s)
        except gevent.GreenletExit:
            row |= {"sent_s": sent_s - session.t0_s, "e2e_s": time.monotonic() - sent_s}
            row |= {"outcome": "cut", "error": "stopped before the answer came"}
            raise
        finally:
            session.in_flight -= 1
            session.write(row)


def _read(response: Any, sent_s: float, finished_s: float) -> dict[str, Any]:
    """The server's part of a row, from an answer's headers and body."""
    status = response.status_code
    if status != 200:
        return {"status": status, **_failure(response)}
    row: dict[str, Any] = {"outcome": "ok", "status": status}
    headers = response.headers
    if SERVED_BY not in headers:
        return row | {
            "error": f"the answer has no {SERVED_BY} header: only its end-to-end time is known"
        }
    usage = json.loads(response.content)["usage"]
    row |= {"prompt_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    replica, batch, size, clock, arrived_s, done_s, _ = headers[SERVED_BY].split()
    row |= {"replica_id": replica, "batch_id": batch, "batch_size": size}
    timing = dict(part.strip().split(";dur=") for part in headers["Server-Timing"].split(","))
    row |= {f"{name}_s": float(dur_ms) / 1e3 for name, dur_ms in timing.items()}
    row["inference_s"] = row["prefill_s"] + row["decode_s"]
    if clock == session.clock:
        row["router_s"] = float(arrived_s) - sent_s
        row["rest_s"] = finished_s - float(done_s)
    else:
        # Two clocks: what is not inside the replica cannot be told apart, so all of it is router.
        inside_s = row["batch_wait_s"] + row["engine_queue_s"] + row["inference_s"]
        row["router_s"] = finished_s - sent_s - inside_s
    row["queueing_s"] = row["router_s"] + row["batch_wait_s"] + row["engine_queue_s"]
    return row


def _failure(response: Any) -> dict[str, Any]:
    status, error = response.status_code, getattr(response, "error", None)
    if status == 0:
        late = isinstance(error, TimeoutError | socket.timeout) or "timed out" in str(error)
        return {"outcome": "timeout" if late else "cut", "error": repr(error)[:200]}
    text = (response.content or b"")[:200].decode(errors="replace")
    if status in (429, 503):
        return {"outcome": "rejected", "error": text}
    if status in (408, 504):
        return {"outcome": "timeout", "error": text}
    return {"outcome": "invalid" if status < 500 else "error", "error": text}


@events.request.add_listener
def _measured(response_time: float, context: dict[str, Any], **_: Any) -> None:
    context["kit"]["e2e_s"] = response_time / 1e3


def _say(**message: Any) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def _lines() -> Any:
    """Lines of stdin as they come, without blocking the users."""
    rest = b""
    while chunk := tp_read(0, 4096):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


@events.init.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    """Wait for the first command, so that a run's clock starts when its users do."""
    global session
    session = _Session()
    lines = _lines()
    _say(event="ready")
    first = next(lines, None)
    if first is None:
        sys.exit("stdin closed before the load was to start")
    command = json.loads(first)
    session.t0_s = command["t0_s"]
    environment.parsed_options.num_users = command["users"]
    gevent.spawn(_obey, environment.runner, lines)
    gevent.spawn(_tell, environment.runner)


def _obey(runner: Any, lines: Any) -> None:
    for line in lines:
        command = json.loads(line)
        if "users" in command:
            step = abs(command["users"] - runner.user_count)
            ramp_s = command.get("ramp_s", 0.0)
            runner.start(command["users"], max(step / ramp_s, 0.01) if ramp_s else _SPAWN_PER_S)
        if command.get("stop"):
            break
    runner.quit()


def _tell(runner: Any) -> None:
    while True:
        _say(t_s=time.monotonic(), users=runner.user_count, in_flight=session.in_flight)
        time.sleep(0.25)
