"""Server-sent events of a streamed completion → when its tokens came, and what its end said.

Pure: bytes and instants in, values out. A stream is `data: {json}` events, each ended by an empty
line, the last one `data: [DONE]`.
"""

from __future__ import annotations

import itertools
import json
from typing import Any


class Events:
    """Cuts a byte stream into the data of its events, wherever the network split it."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that `chunk` completes."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found


class Stream:
    """What a client notes while a completion streams in; instants are monotonic seconds."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self.token_s: list[float] = []
        self.done = False
        self.error = ""
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] = {}
        self.kit: dict[str, str] = {}

    def take(self, data: bytes, now_s: float) -> None:
        """One event. Only text counts as a token's arrival: the usage chunk has none."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            for choice in event.get("choices") or ():
                if choice.get("text"):
                    self.token_s.append(now_s)
                self.finish_reason = choice.get("finish_reason") or self.finish_reason
            self.usage = event.get("usage") or self.usage
            self.kit = event.get("kit") or self.kit
            if "error" in event:
                self.error = str(event["error"])
        except (ValueError, AttributeError) as error:
            self.error = f"not a completion event ({error}): {data[:80]!r}"

    def row(self, now_s: float) -> dict[str, Any]:
        """The columns that the client measured itself; `now_s` stands for a last token that is not.

        E2E ends with the last token. TPOT needs the number of tokens, which only the server knows:
        chunks may hold several.
        """
        times = self.token_s
        e2e_s = (times[-1] if times else now_s) - self._sent_s
        row: dict[str, Any] = {"e2e_s": e2e_s, "finish_reason": self.finish_reason}
        if self.usage:
            row["prompt_tokens"] = self.usage.get("prompt_tokens")
            row["output_tokens"] = self.usage.get("completion_tokens")
        if times:
            row["ttft_s"] = times[0] - self._sent_s
            gaps_s = [b - a for a, b in itertools.pairwise(times)]
            row["itl_ms"] = " ".join([f"{gap_s * 1e3:.2f}" for gap_s in gaps_s])
            n = row.get("output_tokens") or 0
            if n >= 2 and len(times) >= 2:
                row["tpot_s"] = (e2e_s - row["ttft_s"]) / (n - 1)
        return row
