"""Imports the kind of an optimizer, and Muon's options under the keys of Megatron-Core, which both libraries pass on to it."""

from typing import Any

from rlcore_import.source import Source

ADAMW = ("adamw", "fusedadam", "adam")
"""The ends of names of AdamW; Megatron-Core calls it "adam"."""
ADAMW_8BIT = ("adamw8bit", "adamw_8bit")
MUON = ("muon", "dist_muon")
SCALES = {("spectral", 0.2): "match_rms_adamw", ("shape_scaling", 1.0): "original"}
"""`scale` by Megatron-Core's muon_scale_mode and muon_extra_scale_factor."""
MUON_KEYS = {
    "muon_momentum": "optimizer.muon.momentum",
    "muon_num_ns_steps": "optimizer.muon.newton_schulz_steps",
    "muon_scale_mode": "optimizer.muon.scale",
    "muon_extra_scale_factor": "optimizer.muon.scale",
    "muon_split_qkv": "no key if true",
    "muon_tp_mode": 'no key if "duplicated" or "distributed"',
    "muon_coefficient_type": 'no key if "quintic"',
}
"""Megatron-Core's options of Muon, with what they are in a recipe."""
NO_OTHER = "AdamW and Muon are the only optimizers"


def import_kind(source: Source, values: dict[str, Any], key: str, default: str) -> None:
    """Import the name of an optimizer, a class or a word."""
    name = source.text(key, default).rpartition(".")[2].lower()
    if name in ADAMW_8BIT:
        values["optimizer.moments"] = "8bit"
    elif name in MUON:
        values["optimizer.name"] = "muon"
    elif name not in ADAMW:
        source.report(key, NO_OTHER)


def import_megatron_muon(source: Source, values: dict[str, Any], prefix: str, nesterov: str) -> None:
    """Import Muon's options where the optimizer is Muon. `nesterov` is the key of that option."""
    if values.get("optimizer.name") != "muon":
        source.ignore(*(f"{prefix}.{key}" for key in (*MUON_KEYS, nesterov)))
        return
    values["optimizer.muon.momentum"] = source.number(f"{prefix}.muon_momentum", 0.95, least=0)
    values["optimizer.muon.nesterov"] = source.flag(f"{prefix}.{nesterov}", True)
    values["optimizer.muon.newton_schulz_steps"] = source.integer(f"{prefix}.muon_num_ns_steps", 5, least=1)
    mode = source.text(f"{prefix}.muon_scale_mode", "spectral")
    factor = source.number(f"{prefix}.muon_extra_scale_factor", 1.0, above=0)
    values["optimizer.muon.scale"] = scale = SCALES.get((mode, factor), "match_rms_adamw")
    if (mode, factor) not in SCALES:
        source.report(f"{prefix}.muon_scale_mode", f'scale = "{scale}", where there it is {mode} times {factor:g}')
    if not source.flag(f"{prefix}.muon_split_qkv", True):
        source.report(f"{prefix}.muon_split_qkv", "queries, keys and values are matrices each")
    if source.text(f"{prefix}.muon_tp_mode", "blockwise") == "blockwise":
        reason = "matrices are updated whole, where tensor ranks there update parts"
        source.report(f"{prefix}.muon_tp_mode", reason, changes_meaning=values.get("trainer.megatron.tensor_parallel", 1) > 1)
    if source.text(f"{prefix}.muon_coefficient_type", "quintic") != "quintic":
        source.report(f"{prefix}.muon_coefficient_type", "the coefficients are those of torch.optim.Muon")
