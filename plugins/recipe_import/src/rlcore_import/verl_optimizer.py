"""Imports the kind of verl's optimizer: AdamW, its moments in 8 bits, or Muon with its options; the policy's and a critic's."""

import math
from typing import Any

from rlcore_import.optimizers import MUON_KEYS, TORCH_MUON, import_kind, megatron_muon
from rlcore_import.source import Source
from rlcore_import.verl_rows import ACTOR

ADAMS_BETAS = [0.9, 0.999]


def import_optimizer_kind(source: Source, values: dict[str, Any], prefix: str, *, is_megatron: bool) -> None:
    """Import AdamW, its moments in 8 bits, or Muon with its options; a critic's where they are others."""
    _kind_of(source, values, prefix, "optimizer")
    is_muon = values.get("optimizer.name") == "muon"
    options = _muon_options(source, prefix, is_megatron) if is_muon else {}
    if "critic.learning_rate" in values:
        options = _critics_kind(source, values, options, is_megatron)
    elif not is_muon:
        _ignore_muon(source, prefix)
    values |= {f"optimizer.muon.{name}": value for name, value in options.items()}


def _kind_of(source: Source, values: dict[str, Any], prefix: str, section: str) -> None:
    key = f"{prefix}.name" if source.look(f"{prefix}.optimizer") is None else f"{prefix}.optimizer"
    import_kind(source, values, key, "AdamW", section)
    source.ignore(f"{prefix}.name", f"{prefix}.optimizer")
    if values.get(f"{section}.moments") == "8bit" and source.look(f"{prefix}.optimizer_impl") == "torchao.optim":
        source.ignore(f"{prefix}.optimizer_impl")


def _critics_kind(source: Source, values: dict[str, Any], policys: dict[str, Any], is_megatron: bool) -> dict[str, Any]:
    """Import a critic's optimizer where it is another; returns the options of Muon of both, the policy's if it has any."""
    prefix = "critic.optim"
    _kind_of(source, values, prefix, "critic")
    own = _muon_options(source, prefix, is_megatron) if values.get("critic.name") == "muon" else {}
    if own and policys and own != policys:
        source.report(f"{prefix}.optimizer", "the critic has the policy's options of Muon")
    for name, default in (("name", "adamw"), ("moments", "float32")):
        kind = values.pop(f"critic.{name}", default)
        if kind != values.get(f"optimizer.{name}", default):
            values[f"critic.{name}"] = kind
    for each, options in ((f"{ACTOR}.optim", policys), (prefix, own)):
        if not options:
            _ignore_muon(source, each)
    return policys or own


def _ignore_muon(source: Source, prefix: str) -> None:
    """Count Muon's options as off: AdamW reads none."""
    own = ("muon_nesterov", "muon_match_adamw_update_rms", "muon_scalar_optimizer")
    source.ignore(*(f"{prefix}.{key}" for key in (*MUON_KEYS, *own)))


def _muon_options(source: Source, prefix: str, is_megatron: bool) -> dict[str, Any]:
    """Return Muon's options: under Megatron the configuration's, under other engines torch's defaults."""
    if not is_megatron:
        _ignore_muon(source, prefix)
        return dict(TORCH_MUON)
    factor = None
    if source.flag(matches := f"{prefix}.muon_match_adamw_update_rms"):
        beta = float(source.take(f"{prefix}.betas", ADAMS_BETAS)[0])
        factor = math.sqrt((1 - beta) / (1 + beta)) if 0 <= beta < 1 else None
        if source.look(f"{prefix}.muon_extra_scale_factor") not in (None, 1, 1.0):
            source.refuse(matches, "false beside muon_extra_scale_factor, which verl derives where it is true")
    ranks = source.integer(f"{ACTOR}.megatron.tensor_model_parallel_size", 1, least=1)
    return megatron_muon(source, prefix, "muon_nesterov", tensor_parallel=ranks, factor=factor)
