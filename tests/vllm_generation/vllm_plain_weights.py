"""The worker's extension for engines on a CPU that keep weights as a checkpoint has them, as engines on GPUs do.

Imported in each rank.
"""

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm_refit_faults import FaultyWorkerExtension

from rlcore_vllm import loading


def _multiply_as_they_are(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _multiply_as_they_are
# Experts then cannot be computed with, whose kernel takes packed ones alone; they can be loaded and looked at.
UnquantizedFusedMoEMethod.process_weights_after_loading = lambda *_: None
loading.is_in_checkpoint_form = lambda *_: True


class PlainWeights(FaultyWorkerExtension):
    """Tells what a refit has brought."""

    def rlcore_refit(self, step, content):
        answer = super().rlcore_refit(step, content)
        if step == "shards":
            print(f"rank {self.rank} has received {self.refit_test_received_bytes()} bytes", flush=True)
        return answer

    def refit_test_received_bytes(self):
        """By the channel shards, in the last refit."""
        return self.weight_transfer_engine.received_bytes

    def refit_test_forget(self):
        """Neither weights are left nor what was noted of how they are loaded."""
        self.weight_transfer_engine.loader = None
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))
