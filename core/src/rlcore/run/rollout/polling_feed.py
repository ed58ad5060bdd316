"""A stream's feed in the thread that generates, which looks at the environment's work now and then."""

import time
from collections.abc import Callable, Sequence

from rlcore.run.rollout.environment_calls import POLL_S
from rlcore.run.rollout.environment_runner import LoopTaskHandle
from rlcore.run.rollout.request_feed import Completion, RequestFeed
from rlcore.spi import GenerateRequest


class PollingFeed(RequestFeed):
    """Ends the stream where the environment's work has failed, or where nothing may go on."""

    def __init__(self, hand_out: Callable[[Sequence[Completion]], None]) -> None:
        super().__init__(hand_out)
        self.driven: LoopTaskHandle | None = None
        """The work that is looked at."""
        self._may_go_on: Callable[[], bool] = lambda: True
        self._polled = 0.0
        self._error: BaseException | None = None

    def begin_polling(self, weight_version: int, may_go_on: Callable[[], bool]) -> None:
        """Begin another stream beside the work."""
        self._may_go_on, self._error = may_go_on, None
        self.begin(weight_version)

    def take(self, *, wait: bool) -> Sequence[GenerateRequest] | None:
        """See rlcore.spi.execution.ResponseFeed."""
        while True:
            self._look()
            taken = super().take(wait=False)
            if taken is None or taken or not wait:
                return taken
            self.wait(POLL_S)

    def _look(self) -> None:
        """Look at the work. Never raises: it is called within the generator."""
        if self.driven is None or time.monotonic() - self._polled < POLL_S:
            return
        try:
            self.driven.poll(0.0)
            if not self._may_go_on():
                self.end()
        except BaseException as error:
            self._error = error
            self.end()
        self._polled = time.monotonic()

    def failure(self) -> BaseException | None:
        """What the work raised while the stream went on, told once."""
        error, self._error = self._error, None
        return error
