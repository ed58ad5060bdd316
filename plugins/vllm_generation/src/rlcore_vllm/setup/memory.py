"""Estimates of a model's memory in an engine, from its sizes."""

from attrs import frozen

from rlcore.spi import find_channel
from rlcore.spi.weights import ITEM_BYTES
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.trainer.step_costs import layer_parameters, num_parameters

LARGEST_SHARE = 0.92
"""Most of a device that an engine is given: what it takes beside its share, contexts and graphs, needs a place too."""
UNPLANNED_SHARE = 0.5
"""The share of a device for engines beside a trainer of which no estimate is known, or beside copies of weights of unknown
size."""
UNPLANNED_BOTH = 0.25
"""The share of a device that has both."""
CUDA_BLOCK_TOKENS, CPU_BLOCK_TOKENS = 16, 128
"""Tokens of one block of the KV cache, vLLM's defaults."""


@frozen(kw_only=True)
class ModelSize:
    """The size of one rank of an engine, in bytes."""

    weights: int
    kv_per_token: int

    def kv_bytes(self, num_tokens: int, block_tokens: int) -> int:
        """KV cache of one sequence: whole blocks, and one that vLLM keeps to itself."""
        return (-(-num_tokens // block_tokens) + 1) * block_tokens * self.kv_per_token


def model_size(
    dims: ModelDims, dtype: str, *, tensor_parallel: int = 1, fp8: bool = False, fp8_cache: bool = False
) -> ModelSize:
    """The size of a decoder with gated MLPs, dense or of experts.

    Norms, biases and the scales of 8-bit weights, a thousandth of the whole, are left out. Where there are fewer KV heads than
    ranks, each rank keeps one; of latent attention each keeps the one narrow state of all heads.
    """
    item, routers = ITEM_BYTES[dtype], dims.num_moe_layers * dims.hidden_size * dims.num_experts
    narrow = sum(layer_parameters(dims)) - routers if fp8 else 0  # of a byte each
    weights = num_parameters(dims) * item - narrow * (item - 1)
    if dims.latent is None:
        width = 2 * max(1, dims.num_kv_heads // tensor_parallel) * dims.head_dim
    else:
        width = dims.latent.key_rank + dims.latent.rotary_width
    kv_per_token = dims.num_layers * width * (1 if fp8_cache else item)
    return ModelSize(weights=int(weights) // tensor_parallel, kv_per_token=kv_per_token)


def copies_bytes(dims: ModelDims, dtype: str, channel: str | None, num_shared: int) -> int:
    """Bytes of the copies of all weights that a device of `num_shared` engines keeps with refit.delta = "device": a rank's of
    each engine and, where whole tensors travel, the sender's."""
    sender = 0 if channel is None or find_channel(channel).sharded else 1
    return (num_shared + sender) * model_size(dims, dtype).weights


def recorder_bytes(max_num_seqs: int, max_model_len: int) -> int:
    """Most bytes of the log-probabilities that one engine keeps on its device, in float32 rows.

    One row for each sequence in the making and one to spare, one for each that has been preempted, and `recorder_ended` of
    samples that wait to be fetched.
    """
    rows = 2 * max_num_seqs + 1 + recorder_ended(max_num_seqs)
    return rows * max_model_len * ITEM_BYTES["float32"]


def recorder_ended(max_num_seqs: int) -> int:
    """Samples that may have ended before their log-probabilities are fetched."""
    return max(1, max_num_seqs // 4)
