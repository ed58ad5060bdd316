"""The components of a step: which keys of a recipe are of each, and in which quantities a change of it can show first."""

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from attrs import frozen

from rlcore.reading import parse_toml
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.difference import GENERATOR, MINIBATCHES, PROMPTS, REWARD
from rlcore_bundles.file_digests import DOT, leaves
from rlcore_bundles.replaying import settings_of

LOGPROBS, RATIOS, LOSS = "log-probabilities", "ratios", "loss"
GRADIENT, RATE, METRICS, WEIGHTS = "gradient", "learning rate", "metrics", "weights after the step"
REFERENCE, CLIP = "reference_logprobs", "clip"
START = "start of the replay"
"""The quantity of a replay that cannot be computed."""
FORWARD = (GENERATOR, LOGPROBS, RATIOS, "previous_logprobs", REFERENCE)
OF_LOSS = (LOSS, GRADIENT, METRICS)
UNREAD = (
    *("run.directory", "run.name", "run.device", "data.*", "checkpoint.*", "sinks.*", "logging.*", "observers.*", "plugins.*"),
    *("evaluation.*", "checkpoint_evaluation.*", "offload.*", "training.warn_*", "training.max_token_mult_prob_error"),
    *("rollout.*timeout_s", "rollout.environment_concurrency", "rollout.on_environment_error", "rollout.max_failed_fraction"),
    *(
        "rollout.dynamic_sampling",
        "rollout.max_refill_ratio",
        "rollout.reuse",
        "rollout.max_samples_per_prompt",
        "cluster.*",
        "training.on_no_signal",
    ),
)
"""Keys that change nothing in a step which is computed again in one process."""
LAYOUT = ("*_parallel", "replicate", "pipeline_layers", "reshard_after_forward", "reduce_every_microbatch")
"""Keys of a trainer's section that need several ranks, or say how they work together."""


@frozen(kw_only=True)
class Component:
    """A part of a step that may be at fault."""

    name: str
    keys: tuple[str, ...] = ()
    """Patterns of its keys. A key is of the first component that has it."""
    shows_in: tuple[str, ...]
    """The quantities, or the last words of their names, in which a change shows first."""


COMPONENTS = (
    Component(name="chat template", keys=("model.chat_template*", "model.path/tokenizer_config.json"), shows_in=(PROMPTS,)),
    Component(name="chat template", keys=("model.path/chat_template.jinja", "rollout.history"), shows_in=(PROMPTS,)),
    Component(name="tokenizer", keys=("model.path/tokenizer.json",), shows_in=(PROMPTS, REWARD)),
    Component(name="dtype", keys=("model.dtype",), shows_in=FORWARD),
    Component(name="model", keys=("model.*",), shows_in=(START, *FORWARD, PROMPTS, REWARD)),
    Component(name="reward", keys=("environment.function.*", "environment.judge.*"), shows_in=(REWARD,)),
    Component(
        name="environment", keys=("environment.*", "rollout.max_turn*", "rollout.tool_parser"), shows_in=(PROMPTS, REWARD)
    ),
    Component(name="temperature", keys=("rollout.temperature",), shows_in=FORWARD),
    Component(name="sampling", keys=("rollout.top_*", "rollout.accept_truncation_bias", "rollout.stop_*"), shows_in=FORWARD),
    Component(name="limits of length", keys=("rollout.*",), shows_in=(PROMPTS, REWARD, "advantages")),
    Component(name="seed", keys=("run.seed",), shows_in=(MINIBATCHES, PROMPTS)),
    Component(name="minibatches", keys=("training.*_per_step",), shows_in=(MINIBATCHES,)),
    Component(name="packing", keys=("training.max_tokens_per_microbatch",), shows_in=FORWARD),
    Component(name="attention kernel", keys=("trainer.*attention*", "trainer.*.transformer_engine"), shows_in=FORWARD),
    Component(name="dtype of the head", keys=("trainer.*head*", "trainer.*logits*"), shows_in=FORWARD),
    Component(name="fp8", keys=("trainer.*fp8*",), shows_in=FORWARD),
    Component(name="layout", keys=(*(f"trainer.*.{one}" for one in LAYOUT), "cluster.*"), shows_in=FORWARD),
    Component(name="adapters", keys=("lora.*",), shows_in=(START, *FORWARD)),
    Component(name="trainer", keys=("trainer.*",), shows_in=(*FORWARD, *OF_LOSS, WEIGHTS)),
    Component(name="reference", keys=("reference.*",), shows_in=(REFERENCE, "advantages")),
    Component(name="critic", keys=("critic.*",), shows_in=("values", "advantages")),
    Component(name="clip of gradients", keys=("optimizer.max_grad_norm",), shows_in=(CLIP, WEIGHTS)),
    Component(name="learning rate", keys=("optimizer.learning_rate", "schedule.*", "run.num_steps"), shows_in=(RATE, WEIGHTS)),
    Component(name="optimizer", keys=("optimizer.*",), shows_in=(WEIGHTS, RATE)),
    Component(name="clip bounds", keys=("algorithm.*.clip_*", "algorithm.*.dual_clip"), shows_in=OF_LOSS),
    Component(
        name="loss denominator", keys=("algorithm.*.loss_normalisation", "algorithm.*.constant_length"), shows_in=OF_LOSS
    ),
    Component(name="KL weight", keys=("algorithm.*.kl_*",), shows_in=(REFERENCE, *OF_LOSS, "advantages")),
    Component(name="advantages", keys=("algorithm.*.advantage_*", "algorithm.*.reward_*"), shows_in=("advantages",)),
    Component(name="advantages", keys=("algorithm.*.length_penalty*", "algorithm.*.gae*"), shows_in=("advantages",)),
    Component(
        name="importance weights",
        keys=(*(f"algorithm.*.{one}" for one in ("importance_*", "geometric_*", "off_policy_*", "previous_logprobs")),),
        shows_in=(*OF_LOSS, "previous_logprobs", RATIOS),
    ),
    Component(name="algorithm", keys=("algorithm.*",), shows_in=(*OF_LOSS, "advantages", MINIBATCHES)),
    Component(name="generator", keys=("generator.*", "refit.*", "async.*"), shows_in=(GENERATOR,)),
)
WHOLE = {"algorithm.name": "algorithm", "trainer.name": "trainer", "environment.name": "environment"}
"""Keys that choose a plugin: where they differ, the sections that come with it are one component."""


def component_of(key: str) -> Component:
    """The component of a key; one of its own where the table has none."""
    for one in COMPONENTS:
        if any(fnmatchcase(key, pattern) for pattern in one.keys):
            return one
    return Component(name=key, shows_in=())


def can_show_in(name: str, quantity: str) -> bool:
    """Return whether a change of a component can show first in a quantity."""
    own = quantity.rpartition(": ")[2]
    shown = {kind for one in COMPONENTS if one.name == name for kind in one.shows_in}
    return quantity in shown or any(own.startswith(kind) or quantity.startswith(kind) for kind in shown)


@frozen(kw_only=True)
class Change:
    """A component that differs between two bundles' recipes."""

    name: str
    keys: tuple[str, ...]

    def lines(self, good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[str]:
        """Each key with its values in the good and in the bad recipe, given as tables of dotted keys. Of another
        plugin it is the name alone."""
        keys = [key for key in self.keys if key in WHOLE] or self.keys
        return [f"{key} = {_shown(bad.get(key))}; in the good one {_shown(good.get(key))}" for key in keys]


def trainer_settings(bundle: Bundle, trainers: Sequence[str]) -> dict[str, Any]:
    """The settings of a replay as the bundle's own run had them, as dotted keys; the trainer's keys for several ranks aside. A
    trainer that is not among the installed `trainers` is the best of these."""
    settings = dict(leaves(settings_of(bundle)))
    table = parse_toml(bundle.recipe)["trainer"]
    name = trainer_name(bundle)
    if name in trainers:
        own = leaves(table.get(name, {}))
        kept = {key: value for key, value in own if not any(fnmatchcase(key, one) for one in LAYOUT)}
        settings |= {"trainer.name": name} | {f"trainer.{name}.{key}": value for key, value in kept.items()}
    return {key: value for key, value in settings.items() if key != "model.path" and not key.startswith("data.")}


def layout_settings(bundle: Bundle) -> dict[str, Any]:
    """The keys of a bundle's ranks on one machine, as dotted keys; none where its trainer had one rank, or several machines."""
    recipe = parse_toml(bundle.recipe)
    cluster, name = recipe.get("cluster"), trainer_name(bundle)
    if cluster is None or cluster["nodes"] > 1:
        return {}
    ranks = cluster["gpus_per_node"] - cluster["generator_gpus_per_node"] - cluster["reference_gpus_per_node"]
    own = leaves(recipe["trainer"].get(name, {}))
    kept = {f"trainer.{name}.{key}": value for key, value in own if any(fnmatchcase(key, one) for one in LAYOUT)}
    return {} if ranks < 2 else {**kept, "trainer.name": name, "cluster.gpus_per_node": ranks}


def trainer_name(bundle: Bundle) -> str:
    """The name of the trainer of a bundle's run: recipes that say "auto" hold the section of the one that was taken."""
    table = parse_toml(bundle.recipe)["trainer"]
    sections = [name for name, section in table.items() if isinstance(section, dict)]
    return str(table["name"]) if table.get("name", "auto") != "auto" or not sections else sections[0]


def changes_of(good: Mapping[str, Any], bad: Mapping[str, Any]) -> list[Change]:
    """The components of which keys differ between two tables of dotted keys."""
    differing = [key for key in dict.fromkeys([*good, *bad]) if good.get(key) != bad.get(key)]
    wholes = {key.partition(".")[0]: name for key, name in WHOLE.items() if key in differing}
    found: dict[str, list[str]] = {}
    for key in differing:
        if any(fnmatchcase(key, pattern) for pattern in UNREAD):
            continue
        name = wholes.get(key.partition(".")[0]) or component_of(key).name
        found.setdefault(name, []).append(key)
    return [Change(name=name, keys=tuple(keys)) for name, keys in found.items()]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of dotted keys."""
    tables: dict[str, Any] = {}
    for key, value in flat.items():
        *path, name = (part.replace(DOT, ".") for part in key.split("."))
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[name] = value
    return tables


def _shown(value: Any) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
