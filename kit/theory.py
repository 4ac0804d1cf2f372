"""What queueing theory says of a load: to lay over what was measured, and to test it by.

Rates are per second, times in seconds. The emulated accelerator's service times are known in closed
form, so of an app that serves one request at a time everything here can be computed beforehand. Of
batches only the capacity can: theory has no simple formula for their waits.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kit.accelerator import NO_ACCELERATOR, VISION_APPS, profile, vision_profile
from kit.lengths import Lengths
from kit.settings import Settings
from kit.workload import Workload

Floats = NDArray[np.float64]
_DRAWN = 4096


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c (Erlang 1917), by the recursion of Erlang B.

    Args:
        servers: c ≥ 1.
        load: λ E[S], in erlangs; from c on everybody waits.
    """
    if load >= servers:
        return 1.0
    blocked = 1.0
    for k in range(1, servers + 1):
        blocked = load * blocked / (k + load * blocked)
    return servers * blocked / (servers - load * (1 - blocked))


def mean_wait_s(
    rate_rps: float, service_s: float, servers: int = 1, service_cv2: float = 1.0,
    arrival_cv2: float = 1.0,
) -> float:  # fmt: skip
    """Mean time that an arrival waits, infinite from saturation on.

    M/M/c by Erlang C, times (ca² + cs²) / 2 for other arrivals and services (Allen and Cunneen: Allen
    1990, Probability, Statistics and Queueing Theory, 5.3), of which arrivals more even than Poisson's
    leave the less the lower the load (`_evenness`). Exact for M/M/c and for M/G/1, where it is
    Pollaczek's and Khinchine's formula; an approximation else, which of bursty arrivals at low load, and
    of even ones at several servers, tells little more than the order.

    Args:
        rate_rps: λ.
        service_s: E[S].
        servers: c.
        service_cv2: squared coefficient of variation of the services, cs².
        arrival_cv2: of the gaps between arrivals, ca²: 1 of Poisson's, 1 ÷ burstiness of gamma's.
    """
    load = rate_rps * service_s
    if load >= servers:
        return math.inf
    waits = erlang_c(servers, load) * service_s / (servers - load)
    varies = arrival_cv2 + service_cv2
    return waits * varies / 2 * _evenness(load / servers, arrival_cv2, varies)


def _evenness(utilisation: float, arrival_cv2: float, varies: float) -> float:
    """Factor for ca² < 1 (Krämer and Langenbach-Belz 1976, 8th International Teletraffic Congress)."""
    if arrival_cv2 >= 1 or not utilisation * varies:
        return 1.0
    return math.exp(-2 * (1 - utilisation) * (1 - arrival_cv2) ** 2 / (3 * utilisation * varies))


def waits_s(arrivals_s: Floats, services_s: Floats, servers: int = 1) -> Floats:
    """How long each of these very requests waits for the next free server, first come first served.

    Lindley's recursion (1952), for several servers Kiefer's and Wolfowitz's (1955): no assumption, so
    a sharper oracle than any mean. Both arrays have a value a request, in order of arrival.
    """
    free_s = [-math.inf] * servers
    waits = np.empty(len(arrivals_s))
    for k, (at_s, service_s) in enumerate(zip(arrivals_s, services_s, strict=True)):
        begun_s = max(float(at_s), heapq.heappop(free_s))
        waits[k] = begun_s - at_s
        heapq.heappush(free_s, begun_s + float(service_s))
    return waits


@dataclass(frozen=True)
class Theory:
    """What is known of a deployment before any load: `capacity_rps`, and services where they are single.

    `why` says what there is no theory of, and is empty where the formula holds.
    """

    capacity_rps: float
    service_s: float
    service_cv2: float
    servers: int
    arrival_cv2: float
    formula: str
    why: str = ""

    def curve(self, rates_rps: Floats) -> pd.DataFrame:
        """For each rate: `rate_rps`, `utilisation`, `mean_wait_s`, `mean_response_s`, `in_system`.

        NaN where there is no theory, infinite beyond saturation.
        """
        waits = np.array([self._wait_s(float(rate)) for rate in rates_rps])
        response = waits + self.service_s
        return pd.DataFrame(
            {
                "rate_rps": rates_rps,
                "utilisation": rates_rps / self.capacity_rps,
                "mean_wait_s": waits,
                "mean_response_s": response,
                "in_system": rates_rps * response,  # Little's law
            }
        )

    def _wait_s(self, rate_rps: float) -> float:
        if self.why:
            return math.nan
        return mean_wait_s(
            rate_rps, self.service_s, self.servers, self.service_cv2, self.arrival_cv2
        )


def of(settings: Settings, workload: Workload, replicas: int | None = None) -> Theory:
    """The theory of a deployment under the lengths that a workload draws.

    Formulas are of one queue that all replicas serve, and of all requests being accepted and answered.

    Args:
        settings: the app on an emulated accelerator.
        workload: its lengths, and the burstiness of its arrivals.
        replicas: how many serve; by default the fixed number, or `max_replicas`.
    """
    fixed = settings.num_replicas
    servers = replicas or (fixed if isinstance(fixed, int) else settings.max_replicas)
    arrival_cv2 = {"constant": 0.0, "poisson": 1.0, "gamma": 1 / workload.burstiness}.get(
        workload.arrivals, math.nan
    )
    unknown = Theory(math.nan, math.nan, math.nan, servers, arrival_cv2, "none")
    if settings.engine != "emulated":
        return _without(unknown, f"times of {settings.engine} are known by measuring only")
    if settings.accelerator == NO_ACCELERATOR:
        return _without(
            unknown, "with no accelerator there is only plumbing, whose times are measured"
        )
    if settings.app in ("unbatched", "resnet50"):
        services = services_s(settings, workload)
        mean_s = float(services.mean())
        kind = {0.0: "D", 1.0: "M"}.get(arrival_cv2, "G")
        formula = f"{kind}/G/{servers}"
        known = Theory(
            servers / mean_s, mean_s, float(services.var()) / mean_s**2, servers, arrival_cv2, formula
        )  # fmt: skip
        if fixed == "auto":
            return _without(known, "the number of replicas changes")
        if math.isnan(arrival_cv2):
            return _without(known, f"no formula for arrivals of kind {workload.arrivals!r}")
        if workload.diurnal:
            return _without(known, "no formula for a rate that goes with the hours of a day")
        if settings.max_queued_requests >= 0:
            queued = settings.max_queued_requests
            return _without(known, f"max_queued_requests = {queued} rejects what would have waited")
        return known
    if settings.app in ("batched", "resnet50-batched"):
        size = min(settings.max_batch_size, settings.max_ongoing_requests)
        limit = settings.max_batch_tokens if settings.app == "batched" else None
        bound = f"full batches of {size}" + (f" or {limit} tokens" if limit else "")
        capacity = servers * _full_rps(settings, workload, size, limit)
        full = Theory(capacity, math.nan, math.nan, servers, arrival_cv2, bound)
        return _without(
            full, "waits of batches have no simple formula; the capacity is of full ones"
        )
    return _without(unknown, f"no closed form of the {settings.app} app")


def services_s(settings: Settings, workload: Workload, n: int = _DRAWN) -> Floats:
    """How long each of the first n requests is executed alone, on the emulated accelerator."""
    return np.array([_batch_s(settings, [pair]) for pair in _drawn(settings, workload, n)])


def _drawn(settings: Settings, workload: Workload, n: int) -> list[tuple[int, int]]:
    lengths, cap = Lengths(workload), settings.max_new_tokens or 2**31
    return [(p, min(o, cap)) for p, o in (lengths[k] for k in range(n))]


def _full_rps(settings: Settings, workload: Workload, size: int, limit: int | None) -> float:
    """Requests a second of one replica whose batches are all as full as may be."""
    pairs = _drawn(settings, workload, max(_DRAWN // 4, 16 * size))
    whole = _filled(pairs, size, limit)[:-1]  # the last one only ran out of requests
    return sum(map(len, whole)) / sum(_batch_s(settings, batch) for batch in whole)


def _filled(
    pairs: list[tuple[int, int]], size: int, limit: int | None
) -> list[list[tuple[int, int]]]:
    """Batches in order of arrival, of so many requests and tokens at most; one request always fits."""
    batches: list[list[tuple[int, int]]] = []
    left, tokens = 0, 0.0
    for pair in pairs:
        left, tokens = left - 1, tokens - sum(pair)
        if left < 0 or tokens < 0:
            batches.append([])
            left, tokens = size - 1, (limit or math.inf) - sum(pair)
        batches[-1].append(pair)
    return batches


def _batch_s(settings: Settings, pairs: list[tuple[int, int]]) -> float:
    if settings.app in VISION_APPS:
        return vision_profile(settings.accelerator).batch_s(len(pairs)) * settings.time_scale
    prompts, outputs = zip(*pairs, strict=True)
    return profile(settings.accelerator).static_batch_s(prompts, outputs) * settings.time_scale


def _without(theory: Theory, why: str) -> Theory:
    return Theory(**{**theory.__dict__, "why": why})
