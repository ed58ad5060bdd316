"""Bytes of the optimizer's state of a parameter, and of copies that its step makes, by `[optimizer]` and Megatron's table."""

from collections.abc import Mapping
from typing import Any

from rlcore.spi import OptimizerSpec
from rlcore.spi.weights import ITEM_BYTES
from rlcore_megatron.setup.config import has_tensor_settings
from rlcore_torchkit.optimizer.settings import BLOCK, DECODED_BYTES, DECODED_ELEMENTS

JOINED_BYTES = 16
"""Bytes of an element whose master is joined, updated and divided, its gradient in float32 included."""

MOMENT_BYTES = {"float32": 8.0, "8bit": 2 * (1 + 4 / BLOCK)}
"""AdamW's two moments of a parameter; in 8 bits those of a block share a float32 scale."""
MOMENTUM_BYTES = 4.0
"""Muon's running mean of the gradient, of a parameter."""
STEP_ELEMENTS = 2**28
"""Most elements, unless one parameter has more, that a step of TransformerEngine's Adam makes float32 copies of at a time."""
ROUND_ELEMENTS = 2**26
"""Most elements, unless one matrix has more, that a rank has of whole matrices at a time, for Muon."""
ROUND_BYTES = 20
"""Bytes of an element that Muon orthogonalizes: sent and received parts, the matrix, and those of an iteration in bfloat16."""


def state_bytes(spec: OptimizerSpec, table: Mapping[str, Any], item: int, owned: float, owned_tables: float) -> float:
    """Bytes of masters and state of the `owned` parameters of a rank, of which `owned_tables` are of embedding, head and
    vision tower.

    `item` is the size of a weight: float32 weights are their own masters. Where groups take matrices out of Muon, each counts
    with the larger of both states.
    """
    moments = MOMENT_BYTES[spec.moments]
    if not has_tensor_settings(spec):
        return owned * (moments if item == ITEM_BYTES["float32"] else _megatron_bytes(table))
    masters = 0 if item == ITEM_BYTES["float32"] else 2  # the bits that bfloat16 weights lack
    of_matrices = moments
    if spec.name == "muon":
        has_others = any(group.name is not None for group in spec.groups)
        of_matrices = max(MOMENTUM_BYTES, moments) if has_others else MOMENTUM_BYTES
    return owned * masters + owned_tables * moments + (owned - owned_tables) * of_matrices


def step_bytes(spec: OptimizerSpec, table: Mapping[str, Any], gradient: int, item: int, owned: float, largest: float) -> float:
    """Bytes of copies that a step makes: of gradients in less than float32, and of state that it computes with.

    `gradient` is the size of a gradient, `largest` the most parameters that TransformerEngine's Adam steps at a time.
    """
    if has_tensor_settings(spec):
        rounds = ROUND_BYTES * min(owned, ROUND_ELEMENTS) if spec.name == "muon" else 0
        joined = 0 if item == ITEM_BYTES["float32"] else JOINED_BYTES
        decoded = joined + (DECODED_BYTES if spec.moments == "8bit" else 0)
        return rounds + decoded * min(owned, DECODED_ELEMENTS)
    if item == ITEM_BYTES["float32"]:
        return 0
    return gradient_copy_bytes(table, gradient) * owned + _copied_bytes(table) * largest


def _megatron_bytes(table: Mapping[str, Any]) -> float:
    """Bytes of masters and moments per parameter. With `store_param_remainders` bfloat16 weights are masters' upper halves."""
    if not table.get("use_precision_aware_optimizer"):
        return 12
    if table.get("optimizer_cpu_offload"):
        return 12 * (1 - float(table.get("optimizer_offload_fraction", 0.0)))
    moments = sum(ITEM_BYTES[table.get(name, "float32")] for name in ("exp_avg_dtype", "exp_avg_sq_dtype"))
    master = ITEM_BYTES[table.get("main_params_dtype", "float32")]
    return moments + (2 if table.get("store_param_remainders", True) else master)


def share_on_host(table: Mapping[str, Any]) -> float:
    """Return the share of the parameters whose optimizer is the host's."""
    return float(table.get("optimizer_offload_fraction", 0.0)) if table.get("optimizer_cpu_offload") else 0.0


def gradient_copy_bytes(table: Mapping[str, Any], gradient: int) -> float:
    """A parameter, for the whole of the optimizer's step. With `use_precision_aware_optimizer` it reads gradients as they are,
    unless it is Megatron's for the host, whose part on the device is another."""
    if gradient == ITEM_BYTES["float32"]:
        return 0
    if table.get("optimizer_cpu_offload"):
        return 4 * (1 - float(table.get("optimizer_offload_fraction", 0.0)))
    return 0 if table.get("use_precision_aware_optimizer") else 4


def _copied_bytes(table: Mapping[str, Any]) -> int:
    """A parameter of those that TransformerEngine's Adam steps at a time: float32 copies of what it keeps in less. It joins
    remainders to weights without one."""
    if not table.get("use_precision_aware_optimizer") or table.get("optimizer_cpu_offload"):
        return 0
    kept = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
    return sum(4 for name in kept if ITEM_BYTES[table.get(name, "float32")] < 4)
