"""The worker's extension with faults that a test orders through a file, and views of what it holds. Imported in each rank."""

import json
import os
import pickle
import signal
import time
from pathlib import Path

from vllm.distributed.device_communicators import shm_broadcast
from vllm_float8 import held_weights

from rlcore_torchkit.refit.digest import tensor_digests
from rlcore_vllm.ranks.worker import WorkerExtension

FAULT_VARIABLE = "VLLM_REFIT_TEST_FAULT"
"""Path of a JSON file: {"rank": …, "wait_for": another file's path} or {"rank": …, "die": true}; taken at the next bucket."""


class FaultyWorkerExtension(WorkerExtension):
    """Waits or dies where it is told to."""

    def rlcore_refit(self, step, content):
        file = Path(os.environ.get(FAULT_VARIABLE, "none"))
        fault = _read(file) if step == "bucket" else None
        if fault is not None and fault["rank"] == self.rank:
            file.unlink()
            if "die" in fault:
                os.kill(os.getpid(), signal.SIGKILL)
            while not Path(fault["wait_for"]).exists():
                time.sleep(0.02)
        return super().rlcore_refit(step, content)

    def refit_test_parameter_digests(self):
        """Of vLLM's own parameters, in the form that its kernels read."""
        parameters = dict(self.model_runner.get_model().named_parameters())
        return dict(zip(parameters, tensor_digests(parameters.values()), strict=True))

    def refit_test_held_weights(self):
        return held_weights(self)

    def refit_test_is_direct(self):
        return self.weight_transfer_engine.loader.is_direct

    def refit_test_copies_messages(self):
        return shm_broadcast.pickle is not pickle

    def refit_test_load_layerwise(self, layerwise):
        """From now on go through vLLM's layerwise reload, or straight into the parameters again."""
        self.weight_transfer_engine.loader.is_direct = not layerwise


def _read(file):
    """The fault that is ordered, or None; the rank that it is meant for may remove it at any moment."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None
