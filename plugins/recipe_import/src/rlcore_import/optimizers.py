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
TORCH_MUON_KEYS = {
    "momentum": "optimizer.muon.momentum, with Muon",
    "nesterov": "optimizer.muon.nesterov, with Muon",
    "ns_steps": "optimizer.muon.newton_schulz_steps, with Muon",
    "adjust_lr_fn": 'optimizer.muon.scale, with Muon; "original" if null',
    "ns_coefficients": "no key if torch's own",
}
"""torch.optim.Muon's own arguments, with what they are in a recipe."""
TORCH_MUON = {"momentum": 0.95, "nesterov": True, "newton_schulz_steps": 5, "scale": "original"}
"""Defaults of torch.optim.Muon, as options of optimizer.muon."""
COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""torch.optim.Muon's of the iteration."""
MOST_STEPS = 99
"""The most newton_schulz_steps of a recipe."""
NO_OTHER = "AdamW and Muon are the only optimizers"


def import_kind(source: Source, values: dict[str, Any], key: str, default: str, section: str = "optimizer") -> None:
    """Import the name of an optimizer, a class or a word, into a section."""
    name = source.text(key, default).rpartition(".")[2].lower()
    if name in ADAMW_8BIT:
        values[f"{section}.moments"] = "8bit"
    elif name in MUON:
        values[f"{section}.name"] = "muon"
    elif name not in ADAMW:
        source.report(key, NO_OTHER)


def megatron_muon(
    source: Source, prefix: str, nesterov: str, *, tensor_parallel: int, factor: float | None = None
) -> dict[str, Any]:
    """Return Megatron-Core's options of Muon as those of optimizer.muon.

    `nesterov` is the key of that option. `factor` takes the place of muon_extra_scale_factor.
    """
    mode = source.text(f"{prefix}.muon_scale_mode", "spectral")
    given = source.number(f"{prefix}.muon_extra_scale_factor", 1.0, above=0)
    used = given if factor is None else factor
    scale = SCALES.get((mode, used), "original" if mode == "shape_scaling" else "match_rms_adamw")
    if (mode, used) not in SCALES:
        source.report(f"{prefix}.muon_scale_mode", f'scale = "{scale}", where there it is {mode} times {used:g}')
    if not source.flag(f"{prefix}.muon_split_qkv", True):
        source.report(f"{prefix}.muon_split_qkv", "queries, keys and values are matrices each")
    if source.text(f"{prefix}.muon_tp_mode", "blockwise") == "blockwise":
        reason = "matrices are updated whole, where tensor ranks there update parts"
        source.report(f"{prefix}.muon_tp_mode", reason, changes_meaning=tensor_parallel > 1)
    if source.text(f"{prefix}.muon_coefficient_type", "quintic") != "quintic":
        source.report(f"{prefix}.muon_coefficient_type", "the coefficients are those of torch.optim.Muon")
    return {
        "momentum": _momentum(source, f"{prefix}.muon_momentum"),
        "nesterov": source.flag(f"{prefix}.{nesterov}", False),
        "newton_schulz_steps": _steps(source, f"{prefix}.muon_num_ns_steps"),
        "scale": scale,
    }


def torch_muon(source: Source, prefix: str) -> dict[str, Any]:
    """Return the arguments of torch.optim.Muon as options of optimizer.muon, with torch's defaults."""
    scale = source.text(f"{prefix}.adjust_lr_fn", "original")
    if scale not in SCALES.values():
        source.refuse(f"{prefix}.adjust_lr_fn", " or ".join(SCALES.values()))
    coefficients = source.take(f"{prefix}.ns_coefficients", COEFFICIENTS)
    if tuple(coefficients) != COEFFICIENTS:
        source.report(f"{prefix}.ns_coefficients", f"{COEFFICIENTS}, torch's own")
    return {
        "momentum": _momentum(source, f"{prefix}.momentum"),
        "nesterov": source.flag(f"{prefix}.nesterov", True),
        "newton_schulz_steps": _steps(source, f"{prefix}.ns_steps"),
        "scale": scale,
    }


def _momentum(source: Source, key: str) -> Any:
    value = source.number(key, 0.95, least=0)
    if value >= 1:
        source.refuse(key, "a number of at least 0 and below 1")
    return value


def _steps(source: Source, key: str) -> Any:
    value = source.integer(key, 5, least=1)
    if value > MOST_STEPS:
        source.refuse(key, f"a whole number of 1 to {MOST_STEPS}")
    return value
