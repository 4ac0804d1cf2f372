"""A server that does nothing, as fast as Python goes: `python noop_server.py [PORT]` prints its port.

Load generators are measured against it. With a second number it holds all answers for so many
seconds, once, 4 seconds after the first request: a stall.
"""

from __future__ import annotations

import asyncio
import sys

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
EVENTS = (
    b'data: {"choices":[{"index":0,"text":"a","finish_reason":"length"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}\n\n'
    b"data: [DONE]\n\n"
)
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n%s" % (
    len(EVENTS),
    EVENTS,
)
STALL_AFTER_S = 4.0


class Noop(asyncio.Protocol):
    """Answers every whole request; requests may come in pieces, or several at once."""

    stall_s = begun_s = open_again_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.rest = transport, b""

    def data_received(self, data: bytes) -> None:
        self.rest += data
        while (end := self.rest.find(b"\r\n\r\n")) >= 0:
            head = self.rest[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self.rest) < end + 4 + length:
                return
            body, self.rest = self.rest[: end + 4 + length], self.rest[end + 4 + length :]
            self._answer(head.startswith(b"post"), STREAM if b'"stream": true' in body else ANSWER)

    def _answer(self, counts: bool, answer: bytes) -> None:
        loop = asyncio.get_running_loop()
        if Noop.stall_s and counts:
            begun_s = loop.time() + STALL_AFTER_S
            Noop.open_again_s, Noop.stall_s = begun_s + Noop.stall_s, 0.0
            Noop.begun_s = begun_s
        if loop.time() < Noop.open_again_s and loop.time() >= Noop.begun_s:
            loop.call_at(Noop.open_again_s, self.transport.write, answer)
        else:
            self.transport.write(answer)


async def main(port: int, stall_s: float) -> None:
    Noop.stall_s = stall_s
    server = await asyncio.get_running_loop().create_server(
        Noop, "127.0.0.1", port, backlog=1024
    )  # fmt: skip
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    given = [float(a) for a in sys.argv[1:]]
    asyncio.run(main(int(given[0]) if given else 0, given[1] if len(given) > 1 else 0.0))
