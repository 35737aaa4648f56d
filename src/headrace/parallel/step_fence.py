"""Orders what a rank's other threads do with its pool behind the steps that it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable


class StepFence:
    """Steps that a rank was sent, and those that it has computed.

    Rank 0 may have all of a step that it wants while another rank still writes the last layer's keys and values. What
    rank 0 then has stored of that rank's pool, or brought into slots that are free again, comes after the step.
    """

    def __init__(self) -> None:
        self._sent = self._computed = 0
        self._changed = threading.Condition()

    def sent(self) -> None:
        """One more step has come: told in the order in which steps and commands come."""
        with self._changed:
            self._sent += 1

    def computed(self) -> None:
        """One more step has been computed, or has failed. Rank 0 is sent none and waits for none."""
        with self._changed:
            self._computed += 1
            self._changed.notify_all()

    def here(self) -> Callable[[], None]:
        """What waits until the steps sent so far are computed, and for none that come later."""
        with self._changed:
            sent = self._sent

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: self._computed >= sent)

        return wait
