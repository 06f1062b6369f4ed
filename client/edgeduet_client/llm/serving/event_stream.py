"""The worker's events, awaited: the bridge from the worker's thread to an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from edgeduet_client.llm.serving.engine import Deliver
from edgeduet_client.llm.serving.events import Done, Event, Failed, Started
from edgeduet_client.llm.serving.refusals import WaitedTooLong
from edgeduet_client.llm.serving.work_queue import Ticket


class EventStream:
    """What one request hears, on the loop that made it.

    Args:
        ask: takes the place in the line, given what delivers the events; what it raises is raised here.
    """

    def __init__(self, ask: Callable[[Deliver], Ticket]) -> None:
        loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._next: Event | None = None

        def deliver(event: Event) -> None:
            # After a second signal the loop may be closed while the worker still winds down.
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._events.put_nowait, event)

        self._ticket = ask(deliver)

    async def begin(self, timeout_s: float) -> None:
        """Wait until the turn came and the first event of the answer is there; :meth:`next` returns that one.

        Raises:
            WaitedTooLong: the turn did not come within ``timeout_s``.
            EdgeDuetError: the request was refused.
        """
        try:
            first = await asyncio.wait_for(self._events.get(), timeout_s)
        except TimeoutError:
            raise WaitedTooLong(
                f"the {timeout_s:g} seconds of this request were over before its turn came", 1
            ) from None
        self._next = self._good(first)
        if isinstance(first, Started):
            self._next = self._good(await self._events.get())

    async def next(self) -> Event | None:
        """Return the next event, ``None`` after the last.

        Raises:
            EdgeDuetError: the request broke off.
        """
        event = self._next if self._next is not None else self._good(await self._events.get())
        if isinstance(event, Done):
            self._next = event
            return None
        self._next = None
        return event

    def cancel(self) -> None:
        """Say that nobody listens any more; the worker is free within a token."""
        self._ticket.cancel()

    @staticmethod
    def _good(event: Event) -> Event:
        if isinstance(event, Failed):
            raise event.error
        return event
