"""One load process from inside: what its users share, and how it is told what to do and tells how it is.

`kit.load` writes a JSON object a line to the stdin of one Locust and reads its state from its stdout.
Several Locusts are a master, which sends nothing, and workers, by Locust's own messages: the master
passes on what it is told, and adds up what they tell. Nothing here imports Locust.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from typing import Any

import gevent
from gevent.event import Event
from gevent.os import tp_read

from kit.arrivals import Arrivals
from kit.clock import clock_id
from kit.lengths import Lengths
from kit.rows import REQUEST_COLUMNS
from kit.workload import Workload

_SPAWN_PER_S = 1000
_TELL_S = 0.25
_DRAIN_S = 5.0
_SUMMED = ("in_flight", "in_flight_s", "sent_requests", "planned_requests", "rate_rps")


class Session:
    """What the users of this process share.

    Args:
        rows: path of the file that takes a row for each attempt; empty where the master has it.
    """

    def __init__(self, rows: str) -> None:
        self._file = os.open(rows, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if rows else None
        self._unsent: list[str] = []
        self.clock = clock_id()
        self.users = itertools.count()
        self.in_flight = self.sent = 0
        self._in_flight_s, self._counted_s = 0.0, time.monotonic()
        self.arrivals: Arrivals | None = None
        self.changed, self.stopping = Event(), Event()
        self._cpu = (time.process_time(), time.monotonic())

    def begin(self, command: dict[str, Any], share: int = 0, shares: int = 1) -> None:
        """Take the workload, and this process's share of its requests."""
        self.t0_s = command["t0_s"]
        if command["clock"] != self.clock:  # another machine's: it tells the time of day as well
            self.t0_s = time.monotonic() - (time.time() - command["t0_day_s"])
        # Numbers go on where an earlier process stopped: the same one would repeat its prompt.
        self.first, self._run = command["first"], command["run"]
        self.numbers = itertools.count(self.first + share, shares)
        self.use(Workload.model_validate(command["workload"]))
        self.plan_s = command["plan_s"]
        """When its plan begins, in seconds of the run's clock."""
        if self.workload.open_loop:
            self.arrivals = Arrivals(self.workload, share, shares)

    def use(self, workload: Workload) -> None:
        """What the next requests are like."""
        self.workload, self.lengths = workload, Lengths(workload)
        # What every body shares is written once; a request adds its prompt and its length.
        options: dict[str, Any] = {
            "temperature": workload.temperature,
            "ignore_eos": workload.ignore_eos,
        }
        if workload.stream:
            options |= {"stream": True, "stream_options": {"include_usage": True}}
        self._options = json.dumps(options)[1:-1]

    def body(self, index: int, prompt_tokens: int, max_tokens: int) -> bytes:
        if self.workload.kind == "image":
            from kit.images import image

            return image(self.workload.seed, index)
        prompt = self.workload.prompt(index, prompt_tokens, self._run)
        # The words need no escaping.
        return f'{{"prompt":"{prompt}","max_tokens":{max_tokens},{self._options}}}'.encode()

    def write(self, row: dict[str, Any]) -> None:
        line = ",".join(_text(row.get(c)) for c in REQUEST_COLUMNS) + "\n"
        if self._file is None:
            self._unsent.append(line)
            return
        try:
            os.write(self._file, line.encode())
        except OSError as error:
            # Load whose rows are lost is worth nothing: stop, and let the parent read why.
            print(f"cannot write {os.environ['KIT_REQUESTS']}: {error.strerror}", file=sys.stderr)
            os._exit(1)

    def count(self, step: int) -> None:
        """Another request is under way (1), or one has ended (−1)."""
        now_s = time.monotonic()
        self._in_flight_s += self.in_flight * (now_s - self._counted_s)
        self._counted_s = now_s
        self.in_flight += step

    def obey(self, command: dict[str, Any]) -> None:
        """What concerns requests: another workload, another rate, or the end."""
        if "workload" in command:
            self.use(Workload.model_validate(command["workload"]))
        if "rate" in command and self.arrivals:
            at_s = max(0.0, command["at_s"] - self.plan_s)
            self.arrivals.change(at_s, command["rate"], command["ramp_s"])
            self.changed.set()
        if command.get("stop"):
            self.stopping.set()
            self.changed.set()

    def state(self) -> dict[str, Any]:
        """How it is going.

        Counts, and `in_flight_s`, their ∫ dt, are since the beginning; `cpu_share` since the last call.
        """
        used_s, now_s = time.process_time(), time.monotonic()
        before, self._cpu = self._cpu, (used_s, now_s)
        share = (used_s - before[0]) / max(now_s - before[1], 1e-9)
        self.count(0)
        told: dict[str, Any] = {
            "in_flight": self.in_flight, "in_flight_s": self._in_flight_s, "cpu_share": share,
        }  # fmt: skip
        if self.arrivals:
            plan_s = max(0.0, now_s - self.t0_s - self.plan_s)
            told["sent_requests"] = self.sent
            told["planned_requests"] = self.arrivals.planned(plan_s)
            if not self.workload.trace:
                told["rate_rps"] = self.arrivals.rate.at(plan_s) / self.arrivals.shares
        return told

    def unsent(self) -> str:
        """Rows that the master has to write, handed out once."""
        lines, self._unsent = self._unsent, []
        return "".join(lines)


def start(environment: Any) -> Session:
    """Take the part that Locust was started for: one on its own, a master, or a worker of one.

    On its own, or as a master, wait for the first command: a run's clock starts when its users do.
    """
    session, runner = Session(os.environ.get("KIT_REQUESTS", "")), environment.runner
    kind = type(runner).__name__
    if kind == "WorkerRunner":
        runner.register_message("kit", lambda environment, msg: _told(session, runner, msg.data))
        return session
    workers: dict[str, dict[str, Any]] = {}
    if kind == "MasterRunner":
        runner.register_message("kit", lambda environment, msg: _heard(session, workers, msg))
        while len(runner.clients.ready) < environment.parsed_options.expect_workers:
            gevent.sleep(0.05)
    lines = _lines()
    _say(event="ready")
    first = next(lines, None)
    if first is None:
        sys.exit("stdin closed before the load was to start")
    command = json.loads(first) | {"clock": session.clock}
    command["t0_day_s"] = time.time() - (time.monotonic() - command["t0_s"])
    count = environment.parsed_options.expect_workers if kind == "MasterRunner" else 1
    if kind == "MasterRunner":
        runner.send_message("kit", command | {"shares": count})
    else:
        session.begin(command)
    plan = Workload.model_validate(command["workload"]).open_loop
    environment.parsed_options.num_users = count if plan else command["users"]
    gevent.spawn(_obey, session, runner, lines, workers, plan)
    gevent.spawn(_tell, session, runner, workers, plan)
    return session


def _told(session: Session, runner: Any, command: dict[str, Any]) -> None:
    """A worker hears from its master."""
    if "t0_s" in command:
        session.begin(command, runner.worker_index, command["shares"])
        gevent.spawn(_report, session, runner)
    else:
        session.obey(command)


def _report(session: Session, runner: Any) -> None:
    while True:
        runner.send_message("kit", session.state() | {"rows": session.unsent()})
        gevent.sleep(_TELL_S)


def _heard(session: Session, workers: dict[str, dict[str, Any]], message: Any) -> None:
    """The master hears from a worker."""
    rows = message.data.pop("rows")
    if rows:
        with open(os.environ["KIT_REQUESTS"], "a") as file:
            file.write(rows)
    workers[message.node_id] = message.data


def _state(session: Session, workers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of the workers together: counts summed, and the share of a core that the busiest takes."""
    if not workers:
        return session.state()
    every = list(workers.values())
    summed = {k: sum(w[k] for w in every) for k in _SUMMED if k in every[0]}
    return summed | {"cpu_share": max(w["cpu_share"] for w in every)}


def _obey(
    session: Session, runner: Any, lines: Any, workers: dict[str, dict[str, Any]], plan: bool
) -> None:
    while runner.state == "ready":  # else Locust's own start would come after what is asked here
        gevent.sleep(0.01)
    master = hasattr(runner, "clients")
    command: dict[str, Any] = {}
    for line in lines:
        command = json.loads(line)
        if master:
            runner.send_message("kit", command)
        else:
            session.obey(command)
        if "users" in command and not plan:
            step = abs(command["users"] - runner.user_count)
            ramp_s = command.get("ramp_s", 0.0)
            runner.start(command["users"], max(step / ramp_s, 0.01) if ramp_s else _SPAWN_PER_S)
        if command.get("stop"):
            break
    if master:
        if not command.get("stop"):
            runner.send_message("kit", {"stop": True})
        # Locust's master leaves at once: wait for the answers under way, and for their rows.
        until_s = time.monotonic() + _DRAIN_S
        gevent.sleep(2 * _TELL_S)
        while any(w["in_flight"] for w in workers.values()) and time.monotonic() < until_s:
            gevent.sleep(_TELL_S / 5)
        gevent.sleep(2 * _TELL_S)
    runner.quit()


def _tell(session: Session, runner: Any, workers: dict[str, dict[str, Any]], plan: bool) -> None:
    while True:
        users = {} if plan else {"users": runner.user_count}
        _say(t_s=time.monotonic(), **_state(session, workers), **users)
        gevent.sleep(_TELL_S)


def _say(**message: Any) -> None:
    os.write(1, (json.dumps(message) + "\n").encode())


def _lines() -> Any:
    """Lines of stdin as they come, without blocking the users."""
    rest = b""
    while chunk := tp_read(0, 4096):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}"
    return str(value).translate(_PLAIN)


_PLAIN = str.maketrans({",": ";", "\n": " ", "\r": " ", '"': "'"})
