"""How often an address may come with a wrong token."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable

ALLOWED = 5
WINDOW_SECONDS = 60.0
_REMEMBERED = 10_000


class Attempts:
    """Counts failures per address; safe to use from several threads.

    After ``allowed`` failures within ``window`` seconds an address is turned away, whatever it brings, until the oldest
    of them is ``window`` seconds old. Of very many addresses those that failed longest ago are forgotten.

    Args:
        allowed: failures per window.
        window: seconds.
        clock: a clock that never runs backwards.
    """

    def __init__(
        self, allowed: int = ALLOWED, window: float = WINDOW_SECONDS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._allowed = allowed
        self._window = window
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()
        self._lock = threading.Lock()

    def wait_for(self, address: str) -> float:
        """Return the seconds until ``address`` is listened to again; 0 if it is now."""
        with self._lock:
            failures = self._recent(address)
            if len(failures) < self._allowed:
                return 0.0
            return max(0.0, failures[0] + self._window - self._clock())

    def failed(self, address: str) -> None:
        """Note a failure."""
        with self._lock:
            failures = self._recent(address)
            failures.append(self._clock())
            self._failures[address] = failures
            self._failures.move_to_end(address)
            while len(self._failures) > _REMEMBERED:
                self._failures.popitem(last=False)

    def _recent(self, address: str) -> deque[float]:
        failures = self._failures.get(address, deque(maxlen=self._allowed))
        while failures and failures[0] + self._window <= self._clock():
            failures.popleft()
        if not failures:
            self._failures.pop(address, None)
        return failures
