"""A pool of processes one of which is killed."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool


class Dying(Executor):
    """Answers some, then loses what it has under way, as a pool does whose process was killed."""

    def __init__(self, lives: int) -> None:
        self.lives = lives

    def submit(self, function, /, *arguments, **named):
        self.lives -= 1
        if self.lives < -1:
            raise BrokenProcessPool
        future = Future()
        if self.lives < 0:
            future.set_exception(BrokenProcessPool())
        else:
            future.set_result(function(*arguments, **named))
        return future
