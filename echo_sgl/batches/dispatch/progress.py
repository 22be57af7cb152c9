"""The dispatcher as the routes see it, which are there before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from echo_sgl.batches.dispatch.dispatcher import Dispatcher
    from echo_sgl.batches.dispatch.line_engine import LineEngine


class Progress(Protocol):
    """What the service needs of the dispatcher."""

    @property
    def endpoints(self) -> tuple[str, ...]:
        """URLs that lines may go to."""

    @property
    def lines_per_s(self) -> float | None:
        """Measured rate; None until enough was measured."""

    def wake(self) -> None:
        """Look at the batches now; may be called from any thread."""

    def wake_deleter(self) -> None:
        """Take away now what deleted files held; may be called from any thread."""


class LateProgress:
    """The dispatcher once it is there: it is made when the event loop runs."""

    def __init__(self, engine: LineEngine) -> None:
        self._engine = engine
        self.dispatcher: Dispatcher | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        return self._engine.endpoints

    @property
    def lines_per_s(self) -> float | None:
        return self.dispatcher.lines_per_s if self.dispatcher else None

    def wake(self) -> None:
        if self.dispatcher:
            self.dispatcher.wake()

    def wake_deleter(self) -> None:
        if self.dispatcher:
            self.dispatcher.wake_deleter()
