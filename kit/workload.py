"""What is asked of a server: how long the requests are, and who sends them when.

A workload is a pure value. The same seed gives the same lengths and times, each request with a prompt
of its own, so that no cache can answer for the model.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kit import prompts, traces
from kit.knobs import describe, explain
from kit.lengths import Lengths, days, length_names

if TYPE_CHECKING:
    import pandas as pd


class WorkloadError(ValueError):
    """A workload that cannot be; the text names the value and what was allowed."""


def _field(
    default: Any, unit: str, text: str, arrivals: tuple[str, ...] = (), **bounds: Any
) -> Any:
    """A pydantic field; `arrivals` are those with which it does something, all unless given."""
    only = {"arrivals": arrivals} if arrivals else {}
    extra: dict[str, Any] = {"unit": unit, "cost": "live", "only": only}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


_RATES = ("poisson", "gamma", "constant", "on-off")
_EVEN_RATES = ("poisson", "gamma", "constant")
PLAN_ONLY = ("burstiness", "diurnal", "max_concurrency", "trace")
"""Fields that are refused, not kept for later, where the arrivals make nothing of them."""


class _Checked(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        fields = type(self).model_fields
        for name in values:
            if name not in fields:
                near = difflib.get_close_matches(name, fields, 1, 0.0)
                raise WorkloadError(f"{name}: no such field; did you mean {near[0]!r}?")
        try:
            super().__init__(**values)
        except ValidationError as error:
            known = {n: describe(type(self), n) for n in fields}
            raise WorkloadError(explain(error, known)) from None


class Stage(_Checked):
    """From `at_s` on so many users, or such a rate; reached evenly within `ramp_s` (0 is a step)."""

    at_s: float = _field(0.0, "s", "When the stage begins", ge=0, le=86_400)
    users: int | None = _field(None, "users", "Users from then on", ge=0, le=10_000)
    rate_rps: float | None = _field(
        None, "requests/s", "Rate from then on, of a workload with a rate", ge=0, le=100_000
    )
    ramp_s: float = _field(0.0, "s", "How long the change takes", ge=0, le=3600)


class Workload(_Checked):
    """What is sent, by users who wait for answers (closed loop) or to a plan that does not (open loop).

    A user sends a request, waits for the answer, thinks, and sends the next: a slow server is asked
    less, and the requests that a user would have sent meanwhile are missing from its latencies
    (coordinated omission). With a plan of `arrivals` requests are sent when they are due.
    """

    kind: Literal["text", "image"] = _field(
        "text", "", "What is asked: to continue a text, or to classify an image"
    )
    lengths: str = _field("azure-2023-conv", "", "Trace whose request lengths are drawn")
    mix_lengths: str = _field("", "", "A second trace to mix in; empty means none")
    mix_share: float = _field(
        0.0, "", "Share of the requests whose lengths are drawn from mix_lengths", ge=0, le=1
    )
    prompt_tokens: int | None = _field(
        None, "tokens", "Length of every prompt; empty means drawn", ge=1, le=131_072
    )
    output_tokens: int | None = _field(
        None, "tokens", "Length of every output; empty means drawn", ge=1, le=131_072
    )
    users: int = _field(8, "users", "Users at the start", ("users",), ge=0, le=10_000)
    arrivals: Literal["users", "poisson", "gamma", "constant", "on-off", "trace"] = _field(
        "users", "", "When requests are sent: by users who wait for answers, or whoever waits, with "
        "gaps as of many independent people (poisson), burstier or more even (gamma), all alike "
        "(constant), in busy spells (on-off), or as they were recorded (trace)",
    )  # fmt: skip
    rate_rps: float = _field(
        1.0, "requests/s", "Mean rate of the arrivals, unless by users or from a trace",
        _RATES, ge=0, le=100_000,
    )  # fmt: skip
    burstiness: float = _field(
        1.0, "", "Shape of the gaps' gamma distribution, of gamma and on-off arrivals: their "
        "coefficient of variation is 1/√burstiness, so that 1 is Poisson and 0.25 bursty",
        ("gamma", "on-off"), ge=0.01, le=1000,
    )  # fmt: skip
    on_s: float = _field(
        16.7, "s", "Mean length of busy spells (exponential), of on-off arrivals; the default is the "
        "Azure 2023 code trace's", ("on-off",), gt=0, le=86_400,
    )  # fmt: skip
    off_s: float = _field(
        43.2, "s", "Mean length of the pauses between (lognormal)", ("on-off",), gt=0, le=86_400
    )
    diurnal: str = _field(
        "", "", "A day whose hours multiply the rate; empty means none", _EVEN_RATES
    )
    day_s: float = _field(
        86_400.0, "s", "How long a day of diurnal lasts: 240 makes ten seconds of an hour",
        _EVEN_RATES, gt=0, le=86_400,
    )  # fmt: skip
    trace: str = _field(
        "", "", "Recorded traffic to send again: a name of the kit's, or a file", ("trace",)
    )
    speed_up: float = _field(
        1.0, "", "How many times faster than recorded a trace is sent", ("trace",), gt=0, le=10_000
    )
    max_concurrency: int | None = _field(
        None, "requests", "Most requests under way to a plan; those due meanwhile are sent late, which "
        "response latency and client wait show; empty means no limit", (*_RATES, "trace"),
        ge=1, le=10_000,
    )  # fmt: skip
    think_time_s: float = _field(
        0.0, "s", "Mean pause of a user between answer and next request (exponential)",
        ("users",), ge=0, le=3600,
    )  # fmt: skip
    stages: tuple[Stage, ...] = _field(
        (), "", "Later changes of the number of users, or of the rate", strict=False
    )
    duration_s: float = _field(60.0, "s", "How long load is sent", gt=0, le=86_400)
    max_prompt_tokens: int = _field(
        8192, "tokens", "Longer prompts of the trace are cut to this", ge=1, le=131_072
    )
    max_output_tokens: int = _field(
        2048, "tokens", "Longer outputs of the trace are cut to this", ge=1, le=131_072
    )
    seed: int = _field(1, "", "Seed of the lengths, prompts and pauses", ge=0, le=2**31)
    timeout_s: float = _field(60.0, "s", "A user gives up on a request after this", gt=0, le=3600)
    stream: bool = _field(
        False, "", "Ask for the output token by token, so that TTFT, TPOT and ITL are measured"
    )
    leave_after_tokens: int | None = _field(
        None, "chunks", "Streaming users leave after so many pieces of the output (0: before the "
        "first); empty means they stay", ge=0, le=131_072,
    )  # fmt: skip
    leave_share: float = _field(
        1.0, "", "Share of the requests that leave_after_tokens concerns", ge=0, le=1
    )
    temperature: float = _field(
        0.0, "", "Randomness of the sampling; 0 takes the likeliest token", ge=0, le=2
    )
    ignore_eos: bool = _field(
        True, "", "Generate as many tokens as asked for, so that loads compare; this hides where "
        "the model would have stopped by itself",
    )  # fmt: skip
    retry: Literal["none", "honour", "storm"] = _field(
        "none", "", "What a user does when rejected (429, 503): give up, wait as long as "
        "Retry-After says (1 s without one) plus up to half of that, or try again within 5 ms",
    )  # fmt: skip
    max_attempts: int = _field(
        10, "attempts", "Tries of one request, the first included, unless retry is 'none'",
        ge=1, le=1000,
    )  # fmt: skip
    repeat_prompts: bool = _field(
        False, "", "Send the same prompts in every run with this seed, so that a server may answer "
        "from what it kept of an earlier run",
    )  # fmt: skip
    processes: int = _field(
        1, "processes", "Locust processes on this machine that share the load", ge=1, le=64
    )
    remote_workers: int = _field(
        0, "processes", "Locust workers on other machines that join: python -m kit.worker there",
        ge=0, le=256,
    )  # fmt: skip
    join_address: str = _field(
        "127.0.0.1:0", "", "Address of this machine and port where workers join; port 0 is any"
    )

    @model_validator(mode="after")
    def _known(self) -> Self:
        for field, known in (
            ("lengths", length_names()), ("mix_lengths", ["", *length_names()]),
            ("diurnal", ["", *days()]),
        ):  # fmt: skip
            if (name := getattr(self, field)) not in known:
                near = difflib.get_close_matches(name, known, 1, 0.0)
                raise WorkloadError(
                    f"{field} = {name!r}: not known; did you mean {near[0]!r}? "
                    f"Known: {', '.join(filter(None, known))}"
                )
        if self.mix_share and not self.mix_lengths:
            raise WorkloadError(
                f"mix_share = {self.mix_share:g} has nothing to draw from: name it in mix_lengths"
            )
        streams = self.stream and self.kind == "text"
        if self.leave_after_tokens is not None and not streams:
            raise WorkloadError(
                f"leave_after_tokens = {self.leave_after_tokens} needs a stream to leave: set "
                "stream = True and kind = 'text'"
            )
        self._planned()
        self._staged()
        return self

    def _planned(self) -> None:
        """What belongs to a plan is given with one only: else it would do nothing, unseen."""
        for name in PLAN_ONLY:
            value, knob = getattr(self, name), describe(type(self), name)
            if value != knob.default and not knob.matters(self):
                kinds = " or ".join(map(repr, knob.only["arrivals"]))
                raise WorkloadError(
                    f"{name} = {value!r} needs arrivals = {kinds}, not {self.arrivals!r}"
                )
        if self.arrivals == "trace":
            try:
                traces.path_of(self.trace)
            except traces.TraceError as error:
                raise WorkloadError(str(error)) from None
        join_at(self.join_address)

    def _staged(self) -> None:
        wanted = "rate_rps" if self.open_loop else "users"
        for stage in self.stages:
            given = {k for k in ("users", "rate_rps") if getattr(stage, k) is not None}
            if given != {wanted} or self.trace:
                raise WorkloadError(
                    f"the stage at {stage.at_s:g} s has {' and '.join(sorted(given)) or 'nothing'}: with "
                    f"arrivals = {self.arrivals!r} there "
                    + ("are no stages" if self.trace else f"must be {wanted}")
                )
        times = [s.at_s for s in self.stages]
        if times != sorted(times) or (times and times[-1] >= self.duration_s):
            raise WorkloadError(
                f"stages at {times} s: must be in order of time and before the end at "
                f"duration_s = {self.duration_s:g}"
            )

    @property
    def open_loop(self) -> bool:
        """Whether requests are sent to a plan, whoever waits for answers."""
        return self.arrivals != "users"

    def requests(self, n: int) -> pd.DataFrame:
        """The first n requests: `prompt_tokens`, `max_tokens`, one row each."""
        import pandas as pd

        lengths = Lengths(self)
        rows = [lengths[i] for i in range(n)]
        return pd.DataFrame(rows, columns=["prompt_tokens", "max_tokens"])

    def prompt(self, index: int, tokens: int, run: int = 0) -> str:
        """A prompt of exactly `tokens` words for request `index`, unlike any other's of any run."""
        return prompts.text(self.seed, index, tokens, 0 if self.repeat_prompts else run)

    def leaves(self, index: int) -> bool:
        """Whether the user leaves the stream of request `index` in mid-way; evenly spread."""
        if self.leave_after_tokens is None:
            return False
        return int((index + 1) * self.leave_share) > int(index * self.leave_share)


def join_at(address: str) -> tuple[str, int]:
    """Host and port of `host:port`.

    Raises:
        WorkloadError: when it is something else.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise WorkloadError(
            f"join_address = {address!r}: must be host:port, such as 192.0.2.7:5557 or 127.0.0.1:0"
        )
    return host, int(port)
