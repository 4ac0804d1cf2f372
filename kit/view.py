"""A session as it is now: what the live plots, the numbers and the sentence beside them are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from kit.settings import Settings

SPAN_S = 300.0
"""How far back the plots reach."""
RECENT_S = 20.0
"""What *now* means in figures: requests that ended, and samples taken, within so many seconds."""


@dataclass(frozen=True, eq=False)
class View:
    """The last minutes of a run, as tables; times in seconds since the run's start.

    Args:
        now_s: when it was taken.
        span_s: width of the plots' time axis, up to now.
        settings: what serves.
        slo: promises in seconds by name (`e2e_p95_s`, …), None promises nothing.
        windows: ended requests by window, columns as `windows.over_time`, within the span.
        recent: requests (`rows.REQUEST_COLUMNS`) that ended within `RECENT_S`, or since the last
            change that took effect if that is later.
        recent_s: how many seconds `recent` covers.
        samples: `sampler.SAMPLE_COLUMNS`, within the span.
        changes: `store.CHANGE_COLUMNS`, all of the run.
        replica_seconds: ∫ running replicas dt since the run's start.
    """

    now_s: float
    span_s: float
    settings: Settings
    slo: Mapping[str, float | None]
    windows: pd.DataFrame
    recent: pd.DataFrame
    recent_s: float
    samples: pd.DataFrame
    changes: pd.DataFrame
    replica_seconds: float
