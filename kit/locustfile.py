"""The load generator: Locust, headless, in processes of its own. Nothing else imports Locust.

`kit.load` starts it and `kit.generator` does what it is told. A row for each request is written at the
moment the request ends, so a kill loses nothing. When stdin closes, because the parent is gone, it
stops by itself.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

import gevent
from gevent.pool import Pool
from geventhttpclient.response import HTTPParseError
from locust import FastHttpUser, events, task
from locust.env import Environment
from locust.exception import StopUser

from kit import answers
from kit.arrivals import Arrivals
from kit.clock import SERVED_BY
from kit.generator import Session, start
from kit.sse import Events, Stream
from kit.workload import Workload

# Pause of a user who found nobody there: asking at once again loads only this machine.
_NOBODY_S = 0.25
_MOST = 10_000  # requests under way to a plan without a limit of its own
_AHEAD_S = 0.02
_TIMER_S = 0.0015  # the event loop's timers are no finer than a millisecond
_DRAIN_S = 5.0

session: Session


class User(FastHttpUser):
    """Sends one request after the other and thinks in between; to a plan, every one when it is due."""

    def __init__(self, environment: Environment) -> None:
        workload = session.workload
        self.network_timeout = self.connection_timeout = workload.timeout_s
        self.concurrency = workload.max_concurrency or (_MOST if workload.open_loop else 1)
        image = workload.kind == "image"
        self.path = "/classify" if image else "/v1/completions"
        # The server looks at the image itself; a body of bytes is all it needs to know.
        self.default_headers = {
            "Content-Type": "application/octet-stream" if image else "application/json"
        }
        super().__init__(environment)
        self.dice = random.Random(f"{workload.seed}.{next(session.users)}")

    def on_start(self) -> None:
        gevent.sleep(max(0.0, session.t0_s - time.monotonic()))
        self.ready_s = time.monotonic()

    def wait_time(self) -> float:
        mean_s = session.workload.think_time_s
        pause_s = self.dice.expovariate(1 / mean_s) if mean_s else 0.0
        self.ready_s = time.monotonic() + pause_s
        return pause_s

    @task
    def ask(self) -> None:
        if session.stopping.is_set():
            raise StopUser
        if session.arrivals:
            self._follow_plan(session.arrivals)
            raise StopUser
        index = next(session.numbers)
        self._ask(index, *self._body(index), self.ready_s)

    def _follow_plan(self, arrivals: Arrivals) -> None:
        """Send each request of the plan when it is due, whoever still waits for an answer."""
        under_way = Pool(self.concurrency)
        plan_s = session.t0_s + session.plan_s
        try:
            while not session.stopping.is_set():
                due_s = plan_s + arrivals.peek_s()
                session.changed.clear()
                if due_s == math.inf:
                    session.changed.wait()
                    continue
                ahead_s = due_s - time.monotonic()
                if ahead_s > _AHEAD_S:
                    session.changed.wait(ahead_s - _AHEAD_S)
                    continue  # another plan, or time to make ready
                # Made before it is due, so that the making delays nothing.
                index = session.first + arrivals.pop()
                made = self._body(index)
                if (ahead_s := due_s - time.monotonic()) > _TIMER_S:
                    gevent.sleep(ahead_s - _TIMER_S)
                while time.monotonic() < due_s:
                    gevent.sleep(0)
                under_way.spawn(self._ask, index, *made, due_s)
            under_way.join(_DRAIN_S)
        finally:
            under_way.kill()

    def _body(self, index: int) -> tuple[bytes, dict[str, Any]]:
        """What is sent as request `index`, and what is known of it before."""
        place = index - session.first if session.workload.trace else index
        prompt_tokens, max_tokens = session.lengths[place]
        known: dict[str, Any] = {"request": index}
        if session.workload.kind == "text":
            known["prompt_tokens"] = prompt_tokens
        return session.body(index, prompt_tokens, max_tokens), known

    def _ask(self, index: int, body: bytes, known: dict[str, Any], due_s: float) -> None:
        workload = session.workload
        attempts = 1 if workload.retry == "none" else workload.max_attempts
        for attempt in range(1, attempts + 1):
            row = known | {"attempt": attempt, "intended_s": due_s - session.t0_s}
            retry_after = self._try(workload, body, row)
            nobody = (row["outcome"] == "cut" and not row.get("status")) or row.get("status") == 404
            if nobody and not workload.open_loop:
                gevent.sleep(_NOBODY_S)
            if row["outcome"] != "rejected" or attempt == attempts:
                return
            pause_s = answers.pause_s(workload.retry, retry_after, self.dice)
            due_s = time.monotonic() + pause_s
            gevent.sleep(pause_s)

    def _try(self, workload: Workload, body: bytes, row: dict[str, Any]) -> str | None:
        """One attempt; fills and writes its row. Returns what Retry-After said."""
        # What Locust itself measured comes back through its request event.
        context: dict[str, Any] = {}
        session.count(1)
        session.sent += row["attempt"] == 1
        sent_s = time.monotonic()
        row["sent_s"] = sent_s - session.t0_s
        row["client_wait_s"] = row["sent_s"] - row["intended_s"]
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
            session.count(-1)
            if "e2e_s" in row:
                row["response_s"] = row["client_wait_s"] + row["e2e_s"]
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


@events.init.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    global session
    session = start(environment)
