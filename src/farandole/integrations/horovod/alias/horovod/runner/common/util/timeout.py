"""A deadline whose error names the activity."""

from __future__ import annotations

from farandole.base.machine import now_s


class TimeoutException(Exception):
    """A deadline has passed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """A deadline `timeout` seconds from now; `message` may contain `{activity}`."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout_s, self._message = timeout, message
        self._deadline_s = now_s() + timeout

    def remaining(self) -> float:
        """Return the remaining seconds, never below 0."""
        return max(0.0, self._deadline_s - now_s())

    def timed_out(self) -> bool:
        """Return whether it is over."""
        return now_s() > self._deadline_s

    def check_time_out_for(self, activity: str) -> None:
        """Raise TimeoutException when it is over."""
        if self.timed_out():
            raise TimeoutException(f"{self._message.format(activity=activity)} ({self._timeout_s:g} s)")
