"""A clock on the screen while something takes its time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm


@contextmanager
def waiting(text: str) -> Iterator[None]:
    """Show `text` with the seconds that the block has taken so far, on stderr."""
    done = threading.Event()
    with tqdm(desc=text, bar_format="{desc}: {elapsed}", leave=True) as bar:

        def tick() -> None:
            while not done.wait(1.0):
                bar.refresh()

        thread = threading.Thread(target=tick, name="kit-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def seconds(total_s: float, text: str, shown: bool) -> tqdm[Any]:
    """A bar of seconds gone by, to be moved by `update`."""
    return tqdm(
        total=total_s, mininterval=1.0, desc=text, unit="s", disable=not shown,
        bar_format="{desc}: {percentage:3.0f}%|{bar}| {n:.0f}/{total:.0f} s",
    )  # fmt: skip
