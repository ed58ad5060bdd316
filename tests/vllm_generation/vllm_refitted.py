"""A real engine in this process, which holds one at most, with what refits it."""

import numpy as np
from vllm_refit_support import (
    CONFIG,
    TOLERANCE,
    checkpoint,
    context_of,
    export_of,
    greatest_error,
    not_finite,
    policy,
    refit,
    sample,
)

from rlcore_vllm.refit.transfer import Transfer
from rlcore_vllm.replicas.replica import LocalReplica
from rlcore_vllm.setup.settings import engine_settings


class Refitted:
    """An engine with its transfer and the weights that it is given."""

    def __init__(self, directory):
        self.directory = directory
        self.context = context_of(directory, "in_process")
        self.replica = LocalReplica("vllm-0", engine_settings(self.context, CONFIG), ())
        self.replica.start()
        self.transfer = Transfer(channel="in_process", replicas=[self.replica], context=self.context, config=CONFIG)

    def weights(self, version):
        return checkpoint(policy(self.directory, version))

    def refit(self, export):
        return refit([self.replica], self.transfer, export)

    def spoil(self, version):
        """Refit with NaN, and fill blocks of the cache by it: more of them than samples have after the next refit."""
        self.refit(export_of(not_finite(self.weights(version)), version))
        assert all(np.isnan(logprobs).any() for _, _, logprobs in sample(self.replica, version, num_samples=4))

    def assert_holds(self, version, *others):
        samples = sample(self.replica, version)
        assert greatest_error(policy(self.directory, version), samples) < TOLERANCE
        for other in others:
            assert greatest_error(policy(self.directory, other), samples) > 100 * TOLERANCE

    def close(self):
        self.transfer.close()
        self.replica.close()
