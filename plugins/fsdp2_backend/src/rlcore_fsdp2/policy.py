"""The trained model and its frozen reference, each whole on its only rank, or sharded over several and never whole on any."""

from typing import Any

import torch
from torch import nn

from rlcore.spi import ConfigError, Head, ModelSpec, Problem, TrainerContext
from rlcore_fsdp2.adapters import Adapters
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.context_parallel import patch_context, patch_context_values, patch_image_context
from rlcore_fsdp2.experts import divide_experts, expert_modules
from rlcore_fsdp2.export import Exporter
from rlcore_fsdp2.invariant_model import invariant_head, use_invariant_kernels
from rlcore_fsdp2.layout import Meshes
from rlcore_fsdp2.load import load_parts
from rlcore_fsdp2.load_from_first import load_from_first
from rlcore_fsdp2.plan_parallel import parallelize_by_plan, plan_problems
from rlcore_fsdp2.sharding import reshard, shard
from rlcore_fsdp2.tensor_parallel import parallelize
from rlcore_fsdp2.working_copy import WorkingCopy
from rlcore_torchkit.architectures.decoders import is_described, is_image_model, layers_of
from rlcore_torchkit.forward.image_forward import freeze_vision, patch_any_decoder
from rlcore_torchkit.forward.packing_probe import probe_packing
from rlcore_torchkit.head.logprobs import Decode, HeadLogprobs, packed_forward, patch_head, shared_forward
from rlcore_torchkit.head.onednn import use_onednn
from rlcore_torchkit.head.values import has_value_head, patch_value_head
from rlcore_torchkit.huggingface.models import architecture_of, load_model
from rlcore_torchkit.layers.rms_norm import fuse_norms
from rlcore_torchkit.layers.rotary import fuse_rotary
from rlcore_torchkit.trainer.float64 import master_dtype


def make_policy(
    spec: ModelSpec, config: Fsdp2Config, meshes: Meshes | None, device: torch.device, head: Head = "tokens"
) -> tuple[Any, Exporter]:
    """The model to train, with its master weights, and what exports it."""
    model = _load_unplaced(spec, master_dtype(spec), meshes, head)
    _check_plan(model, meshes)
    exporter = Exporter(model)
    _freeze(model, config)
    _checkpoint(model, config)
    _place_on_device(model, spec, config, meshes, device)
    _probe(model, spec, meshes, device)
    return model, exporter


def empty_policy(spec: ModelSpec, config: Fsdp2Config, head: Head) -> tuple[Any, Exporter]:
    """The model to train on device "meta", without values, and what would export it."""
    model = load_model(spec, dtype=torch.float32, device="meta", any_decoder=True, head=head)
    exporter = Exporter(model)
    _freeze(model, config)
    return model, exporter


def make_adapted_policy(
    context: TrainerContext, config: Fsdp2Config, meshes: Meshes | None, device: torch.device
) -> tuple[Any, Exporter, Adapters]:
    """The model frozen in the compute dtype beside its adapters, what exports the two as one, and the adapters."""
    model = _load_unplaced(context.model, getattr(torch, context.model.dtype), meshes, context.head)
    _check_plan(model, meshes)
    exporter = Exporter(model)
    _checkpoint(model, config)
    adapters = exporter.adapters = Adapters.attach(model, context, None if meshes is None else meshes.layout)
    _place_on_device(model, context.model, config, meshes, device, drops=context.lora.dropout > 0.0)
    adapters.initialise(model)
    _probe(model, context.model, meshes, device)
    return model, exporter, adapters


def make_working_copy(
    spec: ModelSpec, config: Fsdp2Config, master: Any, device: torch.device, head: Head = "tokens"
) -> WorkingCopy:
    """Make the model that computes in the compute dtype for `master`, on a single rank."""
    model = load_model(spec, dtype=getattr(torch, spec.dtype), any_decoder=True, head=head)
    _freeze(model, config)
    _checkpoint(model, config)
    _place_on_device(model, spec, config, None, device)
    _probe(model, spec, None, device)
    return WorkingCopy(master, model)


def make_reference(spec: ModelSpec, config: Fsdp2Config, meshes: Meshes | None, device: torch.device) -> Any:
    """The frozen model at `spec`, stored in the compute dtype."""
    model = _load_unplaced(spec, getattr(torch, spec.dtype), meshes, "tokens").requires_grad_(False)
    _place_on_device(model, spec, config, meshes, device)
    _probe(model, spec, meshes, device)
    return model


def _load_unplaced(spec: ModelSpec, dtype: torch.dtype, meshes: Meshes | None, head: Head) -> Any:
    """Load the model; if it will be sharded, create it on the meta device."""
    model = load_model(spec, dtype=dtype, device="cpu" if meshes is None else "meta", any_decoder=True, head=head)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch has no grouped product in float64
    return model


def _check_plan(model: Any, meshes: Meshes | None) -> None:
    """ConfigError where tensor ranks cannot divide the policy. A reference that they cannot is whole on each of them."""
    if meshes is None or meshes.layout.tensor == 1 or is_described(model):
        return
    problems = plan_problems(model, meshes.layout.tensor)
    if problems:
        raise ConfigError(problems)


def _probe(model: Any, spec: ModelSpec, meshes: Meshes | None, device: torch.device) -> None:
    """Try a model whose own class computes, before anything trusts it."""
    if is_described(model):
        return
    computing = next(model.parameters()).dtype if meshes is None else getattr(torch, spec.dtype)
    probe_packing(model, device, computing)
    reshard(model)


def _freeze(model: Any, config: Fsdp2Config) -> None:
    if config.freeze == "vision":
        freeze_vision(model)


def _checkpoint(model: Any, config: Fsdp2Config) -> None:
    if not config.activation_checkpointing:
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers_of(model):
        # transformers checkpoints layers in training mode only; what is below them stays in eval, without dropout.
        layer.training = True


def _place_on_device(
    model: Any, spec: ModelSpec, config: Fsdp2Config, meshes: Meshes | None, device: torch.device, *, drops: bool = False
) -> None:
    """`drops`: whether adapters drop some of their inputs."""
    if config.fp8:
        use_float8(model, device)
    described = is_described(model)
    if config.batch_invariant:
        use_invariant_kernels(model, parts=config.batch_invariant_parts)
    elif described:
        fuse_norms(model)
    if device.type == "cpu" and not config.compile_layers:
        use_onednn(model)  # what compiles layers knows of it already, and cannot look into ours
        if described:
            fuse_rotary(model)
    # Nothing may tell tokens with one beginning apart, as replayed experts do; and their gradients, which are added up in the
    # model's dtype, may not be rounded each time.
    is_wide = next(model.parameters()).dtype in (torch.float32, torch.float64)
    shares = not drops and not any(expert_modules(model)) and is_wide
    decode = shared_forward if shares else packed_forward
    _divide(model, spec, meshes, invariant_head(model) if config.batch_invariant else None, decode)
    if config.compile_layers:
        for layer in layers_of(model):
            layer.forward = torch.compile(layer.forward)
    if meshes is None:
        model.to(device)
    else:
        shard(model, meshes, config, spec)
        load = load_parts if described else load_from_first
        load(model, spec, device, parameters_on=torch.device("cpu") if config.cpu_offload else device)


def _divide(model: Any, spec: ModelSpec, meshes: Meshes | None, head: HeadLogprobs | None, decode: Decode) -> None:
    """Give this rank its part of every layer and of the tokens, and the model a head that knows of it; `head` is that of a
    model whose layers are whole, where it has one of its own, and `decode` what computes one that is whole."""
    if not is_described(model):
        size = 1 if meshes is None else meshes.layout.tensor
        if meshes is not None and size > 1 and not plan_problems(model, size):
            parallelize_by_plan(model, meshes.tensor)
        if meshes is not None and meshes.layout.context > 1 and is_image_model(model.config.to_dict()):
            patch_image_context(model, spec, meshes.context_group)
        else:
            patch_any_decoder(model, spec)
        return
    if meshes is None:
        patch_value_head(model) if has_value_head(model) else patch_head(model, head, decode)
        return
    layout = meshes.layout
    if layout.tensor > 1:
        head = parallelize(model, meshes.tensor, sequence_parallel=layout.sequence_parallel, experts=layout.expert == 1)
    if layout.expert > 1 and any(expert_modules(model)):
        divide_experts(model, meshes.expert)
    if has_value_head(model):
        patch_value_head(model, layout.tensor)
    else:
        patch_head(model, head)
    if layout.context > 1 and has_value_head(model):
        patch_context_values(model, meshes.context_group, layout.tensor)
    elif layout.context > 1:
        patch_context(model, meshes.context_group, head=head)


FIRST_CAPABILITY = (8, 9)
"""The lowest compute capability of CUDA devices that multiply float8."""


def use_float8(model: Any, device: torch.device) -> None:
    """Let the linear layers of the decoder's layers compute in float8, with scales from each tensor as it is.

    Names and parameters stay as they are; gradients too are multiplied in float8. On CPU its rounding is emulated. Routers and
    fused experts keep the compute dtype. Raises ConfigError where the device has no float8.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        found = f"true on {torch.cuda.get_device_name(device)}"
        problem = Problem(path="trainer.fsdp2.fp8", found=found, expected="a GPU with float8", remedy="Set it to false")
        raise ConfigError([problem])
    # Padding: the products of a weight's gradient run over tokens, of which there is any number.
    config = Float8LinearConfig(emulate=device.type == "cpu", pad_inner_dim=True)
    layers = architecture_of(model.config).modules.layers_of(model)
    convert_to_float8_training(layers, module_filter_fn=_is_linear, config=config)


def _is_linear(module: nn.Module, name: str) -> bool:  # noqa: ARG001
    return isinstance(module, nn.Linear)
