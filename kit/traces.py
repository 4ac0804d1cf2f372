"""Recorded traffic: when each request came and how long it and its answer were, to be sent again.

Four forms are read, told apart by their columns, as CSV or JSON lines, plain or gzipped:

- the Azure LLM inference traces: `TIMESTAMP` (a date), `ContextTokens`, `GeneratedTokens`;
- Mooncake's: `timestamp` (ms), `input_length`, `output_length`;
- a plain one: `time_s`, `prompt_tokens`, `output_tokens`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING

from kit.accelerator import DATA

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("time_s", "prompt_tokens", "output_tokens")
_FORMS = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): "date",
    ("timestamp", "input_length", "output_length"): "ms",
    COLUMNS: "s",
}


class TraceError(ValueError):
    """A trace that cannot be read; the text names the file, the place and what is allowed."""


def names() -> list[str]:
    """Traces that come with the kit."""
    return sorted(p.name.removesuffix(".csv.gz") for p in (DATA / "traces").glob("*.csv.gz"))


def path_of(trace: str) -> Path:
    """The file of a trace that comes with the kit, or the path that it is.

    Raises:
        TraceError: when there is none.
    """
    path = DATA / "traces" / f"{trace}.csv.gz" if trace in names() else Path(trace)
    if not path.is_file():
        raise TraceError(
            f"trace = {trace!r}: no such file, and no trace of the kit ({', '.join(names())})"
        )
    return path


def read(trace: str) -> pd.DataFrame:
    """The requests of a trace in order of time, the first at 0: `COLUMNS`.

    Args:
        trace: a name (`names`) or the path of a file.

    Raises:
        TraceError: for a file that is missing, empty, of another form, or with a row that cannot be.
    """
    path = path_of(trace)
    return _read(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _read(path: Path, _changed_ns: int) -> pd.DataFrame:
    import pandas as pd

    lines = ".json" in "".join(path.suffixes)
    try:
        raw = pd.read_json(path, lines=True, convert_dates=False) if lines else pd.read_csv(path)
    except (ValueError, OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} cannot be read as {'JSON lines' if lines else 'CSV'}: {error}"
        ) from None
    found = next((f for f in _FORMS if set(f) <= set(raw.columns)), None)
    if found is None:
        wanted = "; or ".join(", ".join(f) for f in _FORMS)
        raise TraceError(
            f"{path} has the columns {', '.join(map(str, raw.columns))}: must be {wanted}"
        )
    if not len(raw):
        raise TraceError(f"{path} has no requests")
    table = raw[list(found)].set_axis(list(COLUMNS), axis=1)
    if _FORMS[found] == "date":
        dates = pd.to_datetime(table["time_s"], utc=True, format="ISO8601", errors="coerce")
        table["time_s"] = (dates - dates.min()).dt.total_seconds()
    table = table.apply(pd.to_numeric, errors="coerce")
    table["time_s"] -= table["time_s"].min()
    if _FORMS[found] == "ms":
        table["time_s"] /= 1e3
    for column, low in zip(COLUMNS, (0, 1, 1), strict=True):
        wrong = ~(table[column] >= low)
        if wrong.any():
            row = int(wrong.to_numpy().argmax())
            name = found[COLUMNS.index(column)]
            raise TraceError(
                f"{path}, request {row + 1}: {name} = {raw[name].iloc[row]}: must be a number from "
                f"{low} on"
            )
    table = table.sort_values("time_s", kind="stable", ignore_index=True)
    typed: pd.DataFrame = table.astype({"prompt_tokens": "int64", "output_tokens": "int64"})
    return typed
