"""Executions that are each wrong in one known way, made from one that keeps everything in the driver's process."""

import threading
import time
from contextlib import contextmanager, suppress

from attrs import evolve
from mutants import killed_by

from rlcore.execution import open_backends
from rlcore.spi import SPI_VERSION, ClusterConfig, LoadStateResult, Provider


class OwnProcess:
    """A right one."""

    def __init__(self, context, config):
        self.context = context

    def __enter__(self):
        self.plugins = self.context.plugins.load_here()
        return self.opened

    def __exit__(self, *error):
        return None

    @contextmanager
    def opened(self):
        with open_backends(self.context.arguments, self.plugins) as backends:
            yield self.changed(backends)

    def changed(self, backends):
        return backends


class Proxy:
    """A group with some of its methods replaced."""

    def __init__(self, group, **methods):
        self._group = group
        vars(self).update(methods)

    def __getattr__(self, name):
        return getattr(self._group, name)


PROVIDER = Provider(name="own_process", spi=SPI_VERSION, config=ClusterConfig, backend=f"{__name__}:OwnProcess", priority=1)


@killed_by("test_a_run_is_that_of_the_drivers_process")
class HalvesTheLoss(OwnProcess):
    def changed(self, backends):
        def train_step(*arguments, **named):
            result, logprobs = backends.trainer.train_step(*arguments, **named)
            return evolve(result, loss=result.loss / 2), logprobs

        return evolve(backends, trainer=Proxy(backends.trainer, train_step=train_step))


@killed_by("test_a_resumed_run_is_one_that_went_on")
class LoadsNoState(OwnProcess):
    def changed(self, backends):
        loaded = LoadStateResult(weight_version=4)  # that of two steps with two updates each
        return evolve(backends, trainer=Proxy(backends.trainer, load_state=lambda request: loaded))


@killed_by("test_backends_come_again_after_a_lost_worker")
class OpensOnce(OwnProcess):
    known = None

    @contextmanager
    def opened(self):
        if self.known is None:
            self.known = open_backends(self.context.arguments, self.plugins)
            self.backends = self.known.__enter__()
        yield self.backends

    def __exit__(self, *error):
        self.known.__exit__(None, None, None)


@killed_by("test_an_error_ends_the_run")
class HidesErrors(OwnProcess):
    @contextmanager
    def opened(self):
        with open_backends(self.context.arguments, self.plugins) as backends, suppress(ValueError):
            yield backends


@killed_by("test_backends_are_closed")
class LeavesBackendsOpen(OwnProcess):
    @contextmanager
    def opened(self):
        self.building = open_backends(self.context.arguments, self.plugins)
        type(self).kept.append(self.building)
        yield self.building.__enter__()

    kept = []  # noqa: RUF012 - the mutant's fault


@killed_by("test_nothing_is_left")
class LeavesAThread(OwnProcess):
    def __enter__(self):
        threading.Thread(target=time.sleep, args=(20,), daemon=True, name="left").start()
        return super().__enter__()
