"""Observers of the loop that are each wrong in one known way, made from one that counts steps."""

import threading

from mutants import killed_by

from rlcore.run.protocols import LoopObserver
from rlcore.spi import SPI_VERSION, LoopObserverProvider


class Counts(LoopObserver):
    """A right one."""

    def __init__(self, run):
        self.run = run

    def on_measure(self, step, weight_version):
        return {"mutant/step": float(step)}


PROVIDER = LoopObserverProvider(name="mutant", spi=SPI_VERSION, observer=f"{__name__}:Counts")


@killed_by("test_a_run_is_the_one_without_it")
class TakesAnotherName(Counts):
    def on_step_trained(self, step):
        return {"reward_mean": 1.0}


@killed_by("test_a_run_is_resumed")
class SavesOnce(Counts):
    def on_start(self, step):
        file = self.run.directory.path / "mutant"
        assert not file.exists(), "the run has begun before"
        file.touch()


@killed_by("test_an_error_of_the_run_stays")
class ClosesAfterTheLastStepAlone(Counts):
    is_over = False

    def on_last_step(self):
        self.is_over = True

    def on_close(self):
        assert self.is_over, "closed before the last step"


@killed_by("test_threads_and_processes_end")
class LeavesAThread(Counts):
    def on_start(self, step):
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()
