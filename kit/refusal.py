"""How a request is refused: for good, or for now; raised in any deployment, answered at the door."""

from __future__ import annotations


class BadRequest(ValueError):
    """A request that is refused before it can reach a batch: `status`, and which `param`."""

    def __init__(self, message: str, status: int = 400, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class Overloaded(RuntimeError):
    """A request that cannot be served now; `retry_after_s` says when to come again."""

    def __init__(self, message: str, status: int = 503, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


def cause_of(error: BadRequest | Overloaded) -> BadRequest | Overloaded:
    """What another replica raised, without Ray's account of how it came here."""
    cause = getattr(error, "cause", error)
    return cause if isinstance(cause, BadRequest | Overloaded) else error
