"""The worker's extension for engines on a CPU that keep weights as a checkpoint has them, as engines on GPUs do.

Imported in each rank.
"""

import torch
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm_refit_faults import FaultyWorkerExtension

from rlcore_vllm.ranks import loading


def _multiply_as_they_are(layer, remove_weight):
    layer.cpu_linear = torch.nn.functional.linear


utils.dispatch_cpu_unquantized_gemm = _multiply_as_they_are
# Experts then cannot be computed with, whose kernel takes packed ones alone; they can be loaded and looked at.
UnquantizedFusedMoEMethod.process_weights_after_loading = lambda *_: None
loading.is_in_checkpoint_form = lambda *_: True


def _keep_sinks(self, _):
    """As FlashInfer's backend for GPUs does."""
    self.kept_sinks = None if self.sinks is None else self.sinks.float().clone()


CPUAttentionBackendImpl.process_weights_after_loading = _keep_sinks


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

    def refit_test_keeps_its_sinks(self):
        """Whether what attention computes with are the parameters, layer by layer; none for layers without."""
        layers = (layer for layer in self.model_runner.get_model().modules() if isinstance(layer, Attention))
        return [torch.equal(layer.impl.kept_sinks, layer.impl.sinks) for layer in layers if layer.impl.sinks is not None]

    def refit_test_forget(self):
        """Neither weights are left nor what was noted of how they are loaded."""
        self.weight_transfer_engine.loader = None
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))
