"""Imports the optimizers and schedules of NeMo-RL's recipes.

NeMo-RL counts the lengths of a schedule in training steps, rlcore in optimizer updates.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rlcore_import.optimizers import MUON_KEYS, import_kind, megatron_muon, torch_muon
from rlcore_import.source import Source

KEYWORDS: Mapping[str, frozenset[str]] = {
    "ConstantLR": frozenset({"factor", "total_iters"}),
    "LinearLR": frozenset({"start_factor", "end_factor", "total_iters"}),
    "CosineAnnealingLR": frozenset({"T_max", "eta_min"}),
}
"""The arguments that the importer reads of each of torch's schedulers."""
SCHEDULER, MEGATRON = "policy.scheduler", "policy.megatron_cfg.scheduler"


def import_optimizer(source: Source, values: dict[str, Any], updates: int) -> None:
    """Import the optimizer and its schedule, with `updates` in a step."""
    if values["trainer.name"] == "megatron":
        source.ignore("policy.optimizer", SCHEDULER, "policy.max_grad_norm")
        _megatron(source, values, updates)
        key = f"{MEGATRON}.lr_{'warmup_iters' if values['schedule.warmup_steps'] else 'decay_style'}"
    else:
        _torch(source, values, updates)
        key = SCHEDULER
    if updates > 1 and (values.get("schedule.warmup_steps") or "schedule.decay" in values):
        source.report(key, "the rate changes with each update, where there it changes once a training step")


def _torch(source: Source, values: dict[str, Any], updates: int) -> None:
    prefix = "policy.optimizer"
    import_kind(source, values, f"{prefix}.name", "torch.optim.AdamW")
    is_muon = values.get("optimizer.name") == "muon"
    rate = source.number(f"{prefix}.kwargs.lr", 1e-3 if is_muon else 1e-6, least=0)
    _require_rate(source, f"{prefix}.kwargs.lr", rate)
    values["optimizer.learning_rate"] = rate
    if is_muon:
        values |= {f"optimizer.muon.{name}": value for name, value in torch_muon(source, f"{prefix}.kwargs").items()}
        if source.number(f"{prefix}.kwargs.eps", 1e-7, above=0) != 1e-7:
            source.report(f"{prefix}.kwargs.eps", "Muon's own eps is 1e-7")
    else:
        betas = source.take(f"{prefix}.kwargs.betas", (0.9, 0.999))
        values["optimizer.betas"] = [float(beta) for beta in betas]
        _require_betas(source, f"{prefix}.kwargs.betas", values["optimizer.betas"])
        values["optimizer.eps"] = source.number(f"{prefix}.kwargs.eps", 1e-8, above=0)
    decay = source.number(f"{prefix}.kwargs.weight_decay", 0.1 if is_muon else 0.01, least=0)
    values["optimizer.weight_decay"] = decay
    if decay:
        source.report(f"{prefix}.kwargs.weight_decay", "biases and norms are not decayed")
    values["optimizer.max_grad_norm"] = source.number("policy.max_grad_norm", 0.0, least=0)
    _torch_schedule(source, values, updates, rate)


def _require_rate(source: Source, key: str, rate: float) -> None:
    if not rate:
        source.refuse(key, "a number above 0")


def _require_betas(source: Source, key: str, betas: Sequence[float]) -> None:
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        source.refuse(key, "two numbers of at least 0 and below 1")


def _torch_schedule(source: Source, values: dict[str, Any], updates: int, rate: float) -> None:
    """Import torch's schedulers: a warm-up and, from the first milestone on, a decay."""
    found = source.take(SCHEDULER)
    stages = [found] if isinstance(found, Mapping) else found or []
    if not isinstance(stages, list) or not all(isinstance(stage, Mapping) for stage in stages):
        source.refuse(SCHEDULER, "a table, or a list of tables")
        return
    names = list[str]()
    milestones = [int(step) for stage in stages for step in stage.get("milestones") or ()]
    warmup = 0
    for stage in (stage for stage in stages if "name" in stage or "milestones" not in stage):
        name, given = str(stage.get("name")).rpartition(".")[2], dict(stage.get("kwargs") or {})
        if unread := sorted({*given} - KEYWORDS.get(name, frozenset(given)) | {*stage} - {"name", "kwargs"}):
            source.report(SCHEDULER, f"{name} here knows no {', '.join(unread)}")
        start = milestones[len(names) - 1] if 0 < len(names) <= len(milestones) else 0
        is_first = not names
        names.append(name)
        if name == "LinearLR" and is_first and _factors(given)[0] < _factors(given)[1]:
            warmup = _warmup(source, given, milestones)
        else:
            _decay(source, values, name, given, start=start, rate=rate)
            if "schedule.decay" in values and start != warmup:
                source.report(SCHEDULER, f"the decay begins after {warmup} steps, where there it begins after {start}")
    values["schedule.warmup_steps"] = warmup * updates


def _factors(given: Mapping[str, Any]) -> tuple[float, float]:
    """Return LinearLR's first and last factor of the rate."""
    return float(given.get("start_factor", 1 / 3)), float(given.get("end_factor", 1.0))


def _warmup(source: Source, given: Mapping[str, Any], milestones: list[int]) -> int:
    """Return the number of warm-up steps."""
    start, end = _factors(given)
    steps = int(given.get("total_iters", 5))
    if steps < 0:
        source.refuse(SCHEDULER, "lengths of at least 0")
    source.report(SCHEDULER, f"the warm-up begins at 0, where there it begins at {start:g} of the rate")
    if end != 1:
        source.report(SCHEDULER, f"the warm-up ends at the rate, where there it ends at {end:g} of it")
    if milestones and milestones[0] < steps:
        source.report(SCHEDULER, f"the warm-up lasts {milestones[0]} steps, after which the rate jumps there")
        return milestones[0]
    return steps


def _decay(source: Source, values: dict[str, Any], name: str, given: Mapping[str, Any], *, start: int, rate: float) -> None:
    """Import a decay that begins at step `start`."""
    remaining = values["run.num_steps"] - start
    if name == "ConstantLR":
        if float(given.get("factor", 1 / 3)) != 1:
            source.report(SCHEDULER, "the rate is the whole one, where there it is a part for some steps")
    elif name == "LinearLR":
        first, last = _factors(given)
        steps = int(given.get("total_iters", 5))
        if first != 1 or last >= 1:
            source.report(SCHEDULER, f"no rate goes from {first:g} to {last:g} of it here: it is left out")
            return
        values |= {"schedule.decay": "linear", "schedule.min_learning_rate_ratio": last}
        if steps != remaining:
            source.report(SCHEDULER, f"the decay ends with the run, where there it ends after {steps} steps")
    elif name == "CosineAnnealingLR":
        least = min(1.0, float(given.get("eta_min", 0.0)) / rate) if rate else 0.0
        values |= {"schedule.decay": "cosine", "schedule.min_learning_rate_ratio": least}
        if given.get("T_max") != remaining:
            source.report(SCHEDULER, f"the decay ends with the run, where there T_max is {given.get('T_max')}")
    else:
        source.report(SCHEDULER, f"no schedule {name} is here: it is left out")


def _megatron(source: Source, values: dict[str, Any], updates: int) -> None:
    prefix, schedule = "policy.megatron_cfg.optimizer", MEGATRON
    import_kind(source, values, f"{prefix}.optimizer", "adam")
    if values.get("optimizer.name") == "muon":
        ranks = values.get("trainer.megatron.tensor_parallel", 1)
        options = megatron_muon(source, prefix, "muon_use_nesterov", tensor_parallel=ranks)
        values |= {f"optimizer.muon.{name}": value for name, value in options.items()}
    else:
        source.ignore(*(f"{prefix}.{key}" for key in (*MUON_KEYS, "muon_use_nesterov")))
    rate, least = source.number(f"{prefix}.lr", 1e-6, least=0), source.number(f"{prefix}.min_lr", 0.0, least=0)
    _require_rate(source, f"{prefix}.lr", rate)
    values["optimizer.learning_rate"] = rate
    values["optimizer.betas"] = [
        source.number(f"{prefix}.adam_beta{number}", beta, least=0) for number, beta in ((1, 0.9), (2, 0.999))
    ]
    _require_betas(source, f"{prefix}.adam_beta1", values["optimizer.betas"])
    values["optimizer.eps"] = source.number(f"{prefix}.adam_eps", 1e-8, above=0)
    decay = source.number(f"{prefix}.weight_decay", 0.01, least=0)
    first = source.number(f"{schedule}.start_weight_decay", decay, least=0)
    values["optimizer.weight_decay"] = first
    if source.number(f"{schedule}.end_weight_decay", first, least=0) != first:
        source.report(f"{schedule}.end_weight_decay", f"weight decay is {first:g} from the first update to the last")
    values["optimizer.max_grad_norm"] = source.number(f"{prefix}.clip_grad", 0.0, least=0)
    warmup = source.integer(f"{schedule}.lr_warmup_iters", 0, least=0)
    values["schedule.warmup_steps"] = warmup * updates
    if source.number(f"{schedule}.lr_warmup_init", 0.0) and warmup:
        source.report(f"{schedule}.lr_warmup_init", "the warm-up begins at 0")
    elif warmup:
        source.report(f"{schedule}.lr_warmup_iters", "the first step has a part of the rate, where there it has none")
    style, steps = source.text(f"{schedule}.lr_decay_style", "constant"), source.integer(f"{schedule}.lr_decay_iters", least=1)
    if style in ("linear", "cosine"):
        values["schedule.decay"] = style
        values["schedule.min_learning_rate_ratio"] = min(1.0, least / rate) if rate else 0.0
        if steps not in (None, values["run.num_steps"]):
            source.report(f"{schedule}.lr_decay_iters", "the decay ends with the run")
    elif style != "constant":
        source.report(f"{schedule}.lr_decay_style", "no such decay: the rate is constant")
