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
import sys
import time
from typing import Any

import gevent
from gevent.os import tp_read
from geventhttpclient.response import HTTPParseError
from locust import FastHttpUser, events, task
from locust.env import Environment

from kit import answers
from kit.clock import SERVED_BY, clock_id
from kit.rows import REQUEST_COLUMNS
from kit.sse import Events, Stream
from kit.workload import Lengths, Workload

_SPAWN_PER_S = 1000
_NOBODY_S = (
    0.25  # pause of a user who found nobody there: asking at once again loads only this machine
)


class _Session:
    """What the users of this process share."""

    def __init__(self) -> None:
        self.use(Workload.model_validate_json(os.environ["KIT_WORKLOAD"]))
        # Numbers go on where an earlier process stopped: the same one would repeat its prompt.
        self.numbers = itertools.count(int(os.environ["KIT_FIRST_REQUEST"]))
        self.users = itertools.count()
        self.clock = clock_id()
        self.t0_s = 0.0
        self.in_flight = 0
        self.rows = os.open(os.environ["KIT_REQUESTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

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
        self.options = json.dumps(options)[1:-1]

    def body(self, index: int, prompt_tokens: int, max_tokens: int) -> bytes:
        if self.workload.kind == "image":
            from kit.images import image

            return image(self.workload.seed, index)
        prompt = self.workload.prompt(index, prompt_tokens)
        # The words need no escaping.
        return f'{{"prompt":"{prompt}","max_tokens":{max_tokens},{self.options}}}'.encode()

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

    def __init__(self, environment: Environment) -> None:
        workload = session.workload
        self.network_timeout = self.connection_timeout = workload.timeout_s
        image = workload.kind == "image"
        self.path = "/classify" if image else "/v1/completions"
        # The server looks at the image itself; a body of bytes is all it needs to know.
        self.default_headers = {
            "Content-Type": "application/octet-stream" if image else "application/json"
        }
        super().__init__(environment)
        self.dice = random.Random(f"{workload.seed}.{next(session.users)}")

    def wait_time(self) -> float:
        mean_s = session.workload.think_time_s
        return self.dice.expovariate(1 / mean_s) if mean_s else 0.0

    @task
    def ask(self) -> None:
        workload, index = session.workload, next(session.numbers)
        prompt_tokens, max_tokens = session.lengths[index]
        body = session.body(index, prompt_tokens, max_tokens)
        known: dict[str, Any] = {"request": index}
        if workload.kind == "text":
            known["prompt_tokens"] = prompt_tokens
        attempts = 1 if workload.retry == "none" else workload.max_attempts
        for attempt in range(1, attempts + 1):
            row = known | {"attempt": attempt}
            retry_after = self._try(workload, body, row)
            if (row["outcome"] == "cut" and not row.get("status")) or row.get("status") == 404:
                gevent.sleep(_NOBODY_S)
            if row["outcome"] != "rejected" or attempt == attempts:
                return
            gevent.sleep(answers.pause_s(workload.retry, retry_after, self.dice))

    def _try(self, workload: Workload, body: bytes, row: dict[str, Any]) -> str | None:
        """One attempt; fills and writes its row. Returns what Retry-After said."""
        # What Locust itself measured comes back through its request event.
        context: dict[str, Any] = {}
        session.in_flight += 1
        sent_s = time.monotonic()
        row["sent_s"] = sent_s - session.t0_s
        try:
            response = self.client.post(
                self.path, data=body, name="ask", stream=workload.stream,
                context={"kit": context},
            )  # fmt: skip
            row |= {"e2e_s": context["e2e_s"], "status": response.status_code}
            headers = response.headers
            if response.status_code != 200:
                row |= _failure(response)
            elif "event-stream" in (headers.get("content-type") or ""):
                _follow(response, sent_s, workload, row)
            else:
                content = response.content
                finished_s = time.monotonic()
                if workload.stream:  # asked for, but not got: Locust's time is the headers'
                    row["e2e_s"] = finished_s - sent_s
                row |= {"outcome": "ok"} | answers.completion(content)
                row |= answers.parts(
                    headers.get("server-timing"), headers.get(SERVED_BY), session.clock, sent_s,
                    finished_s,
                )  # fmt: skip
            return headers.get("retry-after") if headers else None
        except gevent.GreenletExit:
            row.setdefault("e2e_s", time.monotonic() - sent_s)
            row |= {"outcome": "cut", "error": "stopped before the answer was complete"}
            raise
        finally:
            session.in_flight -= 1
            session.write(row)


def _follow(response: Any, sent_s: float, workload: Workload, row: dict[str, Any]) -> None:
    """Read a stream as it comes into its row: however it ends, what was measured is there."""
    stream, split = Stream(sent_s), Events()
    limit = workload.leave_after_tokens if workload.leaves(row["request"]) else None
    ending = {"outcome": "cut", "error": "the stream ended before its [DONE]"}
    # All of the timeout that is left: the socket's own starts anew with every token.
    clock = gevent.Timeout.start_new(max(0.001, sent_s + workload.timeout_s - time.monotonic()))
    try:
        while limit is None or len(stream.token_s) < limit:
            # By lines: `read` and `iter_content` return only once their buffer is full.
            line = response.stream.readline(b"\n")
            if not line:
                break
            for data in split.feed(line):
                stream.take(data, time.monotonic())
        else:
            ending = {"outcome": "left", "error": f"left after {limit} chunks, as asked"}
    except gevent.Timeout:
        ending = {"outcome": "timeout", "error": f"not complete after {workload.timeout_s:g} s"}
    except (OSError, HTTPParseError) as error:
        ending["error"] = f"{ending['error']}: {error!r}"[:200]
    finally:
        clock.close()
        finished_s = time.monotonic()
        row |= stream.row(finished_s)
        response.release()  # an unfinished stream closes its connection: the server sees us leave
    if stream.error:
        ending = {"outcome": "error", "error": stream.error[:200]}
    elif stream.done:
        finished_s = stream.token_s[-1] if stream.token_s else finished_s
        told = stream.kit.get("server_timing"), stream.kit.get("served_by")
        ending = {"outcome": "ok"} | answers.parts(*told, session.clock, sent_s, finished_s)
    row |= ending


def _failure(response: Any) -> dict[str, Any]:
    if response.status_code:
        return answers.failure(response.status_code, response.content or b"")
    error = response.error
    late = isinstance(error, TimeoutError) or "timed out" in str(error)
    return {"outcome": "timeout" if late else "cut", "error": repr(error)[:200]}


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
    while runner.state == "ready":  # else Locust's own start would come after what is asked here
        gevent.sleep(0.01)
    for line in lines:
        command = json.loads(line)
        if "workload" in command:
            session.use(Workload.model_validate(command["workload"]))
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
