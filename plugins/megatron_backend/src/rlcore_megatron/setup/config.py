"""The recipe's section `[trainer.megatron]`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import field, frozen

from rlcore.schema.constraints import PathText, Positive, Seconds, above
from rlcore.spi import OptimizerSpec


@frozen(kw_only=True)
class MegatronConfig:
    """`[trainer.megatron]`: Hugging Face causal language models in Megatron-Core."""

    tensor_parallel: Positive | Literal["auto"] = "auto"
    """Ranks that share each layer: its heads, the columns of its MLP, and the vocabulary. "auto" here and in the next three
    finds the smallest sizes that fit model, optimizer and the longest sequence on the devices; on a CPU it is 1."""
    pipeline_parallel: Positive | Literal["auto"] = "auto"
    """Stages that the layers are divided into."""
    context_parallel: Positive | Literal["auto"] = "auto"
    """Ranks that share the tokens of each sequence, for sequences too long for one."""
    expert_parallel: Positive | Literal["auto"] = "auto"
    """Ranks that share the experts of a mixture-of-experts layer."""
    expert_tensor_parallel: Positive = 1
    """Ranks that share the columns of each expert."""
    virtual_pipeline_parallel: Positive = 1
    """Parts of the model on each pipeline stage: more of them leave stages idle for less time and send more between them."""
    pipeline_layers: tuple[Positive, ...] | Literal["even"] = "even"
    """Layers of each stage, from the first to the last. With virtual parts, all stages' first parts come before any second
    part. "even": as equal as possible, with fewer layers at the ends, which hold the embedding and the head."""
    sequence_parallel: bool = True
    """With tensor_parallel, norms and residuals are divided over the same ranks by tokens: less memory at the same traffic."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that are recomputed in the backward pass instead of kept. "selective": those of attention's scores. "full":
    all but the inputs of layers. "none": none."""
    freeze: Literal["none", "vision"] = "none"
    """"vision": freeze the vision tower and its projector; only the language model trains. "none": freeze nothing."""
    transformer_engine: bool | None = None
    """Whether layers are TransformerEngine's. None uses them if it is installed and there is a GPU, but not in float32, which
    it rounds to TF32, and not with [lora]."""
    fp8: bool = False
    """Compute the linear layers in float8 (needs TransformerEngine)."""
    batch_invariant: bool = False
    """Compute with the kernels of an engine with `generator.vllm.batch_invariant`, for bitwise equal log-probabilities; slower.
    Qwen3 without experts in bfloat16, on GPUs of compute capability 9, with vLLM installed beside the trainer
    (docs/train-inference-agreement.md)."""
    batch_invariant_parts: Positive = 1
    """Number of the engine's ranks, `generator.vllm.tensor_parallel`; needs batch_invariant. Products of o_proj and down_proj
    are computed in as many parts, and added in the order of ranks. tensor_parallel is 1, or as many without
    sequence_parallel."""
    mtp: bool = False
    """Load, train and save the head that predicts the token after the next, of a model whose config.json has
    num_nextn_predict_layers = 1. The policy trains as it does without, and refits do not send the head."""
    mtp_loss_weight: Annotated[float, above(0, "To train no head, leave mtp out")] = 0.1
    """What the head's mean cross-entropy over the step's generated tokens is multiplied by."""
    conversion_cache: bool = False
    """Keep the model in Megatron's distributed format too, and read that the next time: in $RLCORE_MEGATRON_CHECKPOINT_DIR,
    else $HF_HOME/rlcore, else ~/.cache/huggingface/rlcore."""
    pretrained_checkpoint: PathText | None = None
    """A Megatron distributed checkpoint (torch_dist) to take the initial weights from; model.path still gives the architecture
    and the tokenizer."""
    collective_timeout_s: Seconds = 1800.0
    """Most seconds that a rank waits for the others in one collective before the run ends."""
    transformer: Mapping[str, Any] = field(factory=dict)
    """Further fields of Megatron's TransformerConfig."""
    optimizer: Mapping[str, Any] = field(factory=dict)
    """Further fields of Megatron's OptimizerConfig."""
    scheduler: Mapping[str, Any] = field(factory=dict)
    """Fields of Megatron's OptimizerParamScheduler, which then takes the place of `[schedule]`."""
    ddp: Mapping[str, Any] = field(factory=dict)
    """Further fields of Megatron's DistributedDataParallelConfig."""


def has_tensor_settings(spec: OptimizerSpec) -> bool:
    """Return whether `[optimizer]` is more than AdamW with one setting for all tensors and moments in float32, so that Megatron
    does not compute the step."""
    return spec.name != "adamw" or spec.moments != "float32" or bool(spec.groups)
