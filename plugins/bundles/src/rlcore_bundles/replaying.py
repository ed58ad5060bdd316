"""Computes the step of a bundle again, by the loop of a run: its samples are the bundle's, all else is computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from attrs import evolve, frozen

from rlcore.config.load import Origin, RawRecipe
from rlcore.model_files import config_number
from rlcore.reading import parse_toml
from rlcore.registry.discovery import Entry, Registry
from rlcore.run.data.text import tokenizers
from rlcore.run.execution.context import execution
from rlcore.run.interrupt import InterruptGuard
from rlcore.run.loop import Loop
from rlcore.run.plan.in_process_overrides import PYTHON, InProcessOverrides
from rlcore.run.plan.prepare import prepare, require_device
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.protocols import CollectedRollouts, LoopObserver, LoopPosition, Source, TrainedStep, WeightSync, always
from rlcore.run.report.progress import Progress
from rlcore.run.report.timing import PhaseClock
from rlcore.run.train_step.mismatch_monitor import MismatchMonitor
from rlcore.run.train_step.policy import PolicyLearner
from rlcore.run.train_step.scorers import Reference, scorers_of
from rlcore.spi import (
    AgentEnvironment,
    ConfigError,
    Environment,
    EnvironmentContext,
    LoadStateRequest,
    Problem,
    Role,
    RolloutBatch,
    Row,
)
from rlcore.spi.arrays import AnyArray, Float32Array
from rlcore.spi.execution import Backends
from rlcore.spi.weights import ITEM_BYTES
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.file_digests import file_of, leaves
from rlcore_bundles.own_step import loss_of, repeated
from rlcore_bundles.recorded_groups import Notes, RecordedTrainer, environment_of, scored_columns
from rlcore_bundles.storage import MODEL, STATE
from rlcore_bundles.weight_digests import weight_digests

TRUST = "trust_remote_code"
"""Key of [model]: the code that comes with a model is executed."""
DROPPED = (
    "generator",
    "refit",
    "async",
    "cluster",
    "sinks",
    "logging",
    "evaluation",
    "checkpoint_evaluation",
    "observers",
    "receipts",
)
"""Sections that a replay does not read: it generates nothing, and runs in one process unless the command says otherwise."""


@frozen(kw_only=True, eq=False)
class ReplayOverrides(InProcessOverrides):
    """Takes out of a bundle's recipe what a replay does not read."""

    model: str
    """The directory of the weights, or the recipe's own model."""
    adapters: Path | None
    """The directory of the adapters that the step begins with."""
    is_own_loop: bool = False
    """True for a step of a program's own loop, which has no environment."""

    def in_place(self, raw: RawRecipe) -> RawRecipe:
        """The recipe of the replay."""
        values = dict(raw.values)
        values["data"] = {"train": {"source": PYTHON}}
        values["checkpoint"] = {"at_end": False, "every_n_steps": 0, "model_card": False}
        values["sinks"] = {"names": []}
        # Without [async] no samples are older than their step, which is all that a replay repeats.
        values["rollout"] = {key: value for key, value in values.get("rollout", {}).items() if key != "reuse"}
        values["model"] = {**values["model"], "path": self.model}
        if self.adapters is not None:
            values["lora"] = {**values["lora"], "init_from": str(self.adapters)}
        return evolve(raw, values=values)

    def described(self, registry: Registry) -> Registry:
        """The plugins, with generators of every dtype: a replay builds none."""
        return evolve(registry, entries=tuple(_of_every_dtype(entry) for entry in registry.entries))

    def build(self, entry: Entry, context: EnvironmentContext, config: Any) -> Environment | AgentEnvironment:
        """Return the environment of the step."""
        return cast("Environment", _NoEnvironment()) if self.is_own_loop else super().build(entry, context, config)


class _NoEnvironment:
    """Stands in the plan of an own loop's step; nothing calls it."""


def _of_every_dtype(entry: Entry) -> Entry:
    if entry.role != "generator" or entry.provider is None:
        return entry
    return evolve(entry, provider=evolve(entry.provider, dtypes=ITEM_BYTES.keys()))


class RecordedSamples(Source):
    """The samples of a bundle."""

    def __init__(self, samples: CollectedRollouts) -> None:
        self._samples = samples

    def sample(self, step: int, weight_version: int, may_go_on: Any = always) -> RolloutBatch:  # noqa: ARG002
        """See Source."""
        return self._samples


@frozen(kw_only=True, eq=False)
class RecordedValues:
    """Adds the critic's values as they were recorded: a replay trains no critic."""

    columns: Mapping[str, AnyArray]

    def score(self, samples: RolloutBatch, position: LoopPosition) -> RolloutBatch:  # noqa: ARG002
        """See Scorer."""
        return evolve(samples, batch=evolve(samples.batch, token_columns={**samples.batch.token_columns, **self.columns}))


class Keeper(LoopObserver):
    """Keeps the step for comparison."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.step: TrainedStep | None = None
        self.metrics: Mapping[str, float] = {}

    def on_batch(self, step: TrainedStep) -> None:
        """See LoopObserver."""
        self.step = step
        self.notes.begin(wanted=True)

    def on_log(self, step: int, metrics: Mapping[str, float]) -> None:  # noqa: ARG002
        """See LoopObserver."""
        self.metrics = metrics


@frozen(kw_only=True)
class Start:
    """The weights that a replay begins with."""

    model: str
    """The model's directory or name."""
    adapters: Path | None = None
    state: Path | None = None
    """The trainer's state, with its optimizer; None where the optimizer begins anew."""

    @classmethod
    def of(cls, bundle: Bundle, weights: Path | None = None) -> "Start":
        """The start that a bundle allows. ConfigError where its weights are missing."""
        recipe = parse_toml(bundle.recipe)
        own, has_adapters = str(recipe["model"]["path"]), "lora" in recipe
        folder = weights
        if folder is None and bundle.directory is not None and bundle.weights != "none":
            folder = bundle.directory / MODEL
        if folder is not None:
            state = None if weights is not None or bundle.weights != "state" else Path(bundle.directory or ".") / STATE
            return cls(model=own if has_adapters else str(folder), adapters=folder if has_adapters else None, state=state)
        if bundle.weight_version == 0:
            return cls(model=own)
        found = f"a bundle without weights, of weight version {bundle.weight_version}"
        expected = "the model at the beginning of the step"
        remedy = "Name its Hugging Face directory with --weights, or record the step with --weights model."
        raise ConfigError([Problem(path="BUNDLE", found=found, expected=expected, remedy=remedy)])

    def is_whole(self, bundle: Bundle) -> bool:
        """Return whether the optimizer begins as it did in the bundle's step."""
        return self.state is not None or bundle.weight_version == 0

    def load(self, bundle: Bundle, backends: Backends) -> int:
        """Load the trainer's state, if there is one; return the version of the weights in the replay."""
        if self.state is None:
            return 0
        backends.trainer.load_state(LoadStateRequest(directory=self.state))
        return bundle.weight_version


def settings_of(bundle: Bundle) -> dict[str, Any]:
    """The sections of a bundle's recipe that a replay reads. It takes the best trainer that is installed, and trusts no code of
    a model unless the command does. ConfigError where a key names a file within the bundle: nothing there is executed."""
    recipe = {name: section for name, section in parse_toml(bundle.recipe).items() if name not in DROPPED}
    if problems := list(_own_files(bundle, recipe)):
        raise ConfigError(problems)
    if bundle.own_step is not None:
        recipe["algorithm"] = {"name": "own_loop", "own_loop": {"opened": True}}  # without the reference, which no step reads
    recipe["model"].pop(TRUST, None)
    recipe["trainer"] = {"name": "auto"}
    recipe.setdefault("run", {})["device"] = "auto"
    if recipe["model"].get("dtype", "auto") == "auto":
        recipe["model"]["dtype"] = bundle.environment["dtype"]
    return recipe


def _own_files(bundle: Bundle, recipe: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield the keys whose file lies in the bundle, which may come from somebody else."""
    for key, value in () if bundle.directory is None else leaves(recipe):
        file = file_of(value) if isinstance(value, str) else None
        if file is not None and bundle.directory is not None and file.resolve().is_relative_to(bundle.directory.resolve()):
            remedy = "Read the file, and copy it out of the bundle."
            yield Problem(path=key, found=f"{file}, within the bundle", expected="a file of this machine", remedy=remedy)


def plan_of(bundle: Bundle, start: Start, overrides: Sequence[str], settings: Mapping[str, Any] | None = None) -> RunPlan:
    """The checked plan of a replay, with nothing allocated. `settings` is a recipe in place of the bundle's."""
    origin = Origin(label="the bundle", directory=Path.cwd())
    if is_own_loop := bundle.own_step is not None:
        loss_of(bundle)
    given = ReplayOverrides(model=start.model, adapters=start.adapters, origin=origin, is_own_loop=is_own_loop)
    settings = settings_of(bundle) if settings is None else settings
    plan = prepare(settings, overrides, given=given)
    own = str(parse_toml(bundle.recipe)["model"]["path"])
    if plan.algorithm.needs.reference_logprobs and plan.recipe.reference is None and own != start.model:
        # The reference of the run was the policy's beginning, and the step's weights are later ones.
        plan = prepare({**settings, "reference": {"path": own}}, overrides, given=given)
    require_device(plan)
    if plan.recipe.model.path != start.model:
        problem = Problem(path="model.path", found="an override", expected="none", remedy="Name weights with --weights.")
        raise ConfigError([problem])
    size, tokens = config_number(start.model, "vocab_size"), bundle.sampled.batch.tokens
    if size is not None and not 0 <= tokens.min(initial=0) <= tokens.max(initial=0) < size:
        found = f"{start.model}, a model of {size} tokens"
        expected = f"one that has the bundle's tokens, {tokens.min()} to {tokens.max()}"
        raise ConfigError([Problem(path="model.path", found=found, expected=expected, remedy="Name weights with --weights.")])
    return plan


@frozen(kw_only=True, eq=False)
class Replayed:
    """A step computed again."""

    bundle: Bundle
    start_logprobs: Float32Array
    """float32 [T]: the policy's log-probabilities of all samples at the beginning of the step."""
    sampled_logprobs: Float32Array
    """float32 [T]: likewise, of each token of `versions` with the weights that sampled it."""
    versions: frozenset[int]
    """The weight versions, as the bundle counts them, that were there."""


def replayed(bundle: Bundle, plan: RunPlan, start: Start, *, digests: bool) -> Replayed:
    """Compute a step again from its samples. `digests`: those of the weights behind it are computed too."""
    if bundle.own_step is not None:
        return _replayed_own(bundle, plan, start, digests=digests)
    notes, progress = Notes(), Progress()
    keeper, plan = Keeper(notes), _without_generator(plan)
    with _backends(plan, bundle.sampled.rows) as backends:
        version = start.load(bundle, backends)
        batch = bundle.sampled.batch
        start_logprobs = backends.trainer.logprobs(batch, np.arange(batch.num_sequences), "policy", version)
        _loop(bundle, plan, backends, _at_version(bundle.sampled, version), keeper, progress, version).run()
        after = weight_digests(backends.trainer) if digests else {}
    step = keeper.step
    assert step is not None
    again = evolve(
        bundle,
        recipe=plan.resolved,
        environment=environment_of(plan),
        scored=scored_columns(step),
        trained=step.trained,
        updates=tuple(notes.updates),
        digests_before={},
        digests_after=after,
        metrics=keeper.metrics,
    )
    versions = frozenset([bundle.weight_version])
    return Replayed(bundle=again, start_logprobs=start_logprobs, sampled_logprobs=start_logprobs, versions=versions)


def _replayed_own(bundle: Bundle, plan: RunPlan, start: Start, *, digests: bool) -> Replayed:
    """Compute a step of an own loop again."""
    with _backends(plan) as backends:
        version = start.load(bundle, backends)
        before = weight_digests(backends.trainer) if digests else {}
        update = repeated(bundle, backends.trainer, version)
        after = weight_digests(backends.trainer) if digests else {}
    again = evolve(
        bundle,
        recipe=plan.resolved,
        environment=environment_of(plan),
        updates=(update,),
        digests_before=before,
        digests_after=after,
    )
    logprobs, versions = update.logprobs, frozenset([bundle.weight_version])
    assert logprobs is not None, "of an own step"
    return Replayed(bundle=again, start_logprobs=logprobs, sampled_logprobs=logprobs, versions=versions)


def policy_logprobs(bundle: Bundle, plan: RunPlan) -> Float32Array:
    """float32 [T]: the log-probabilities of a bundle's samples with the weights that the plan's model holds."""
    with _backends(plan) as backends:
        batch = bundle.sampled.batch
        return backends.trainer.logprobs(batch, np.arange(batch.num_sequences), "policy", 0)


@contextmanager
def logprobs_at(bundle: Bundle, plan: RunPlan, start: Start) -> Iterator[Callable[[float], Float32Array]]:
    """Yield a function that returns the log-probabilities of a bundle's samples at a temperature, float32 [T]."""
    with _backends(plan) as backends:
        version, batch = start.load(bundle, backends), bundle.sampled.batch
        numbers = np.arange(batch.num_sequences)
        yield lambda temperature: backends.trainer.at_temperature(temperature).logprobs(batch, numbers, "policy", version)


def _without_generator(plan: RunPlan) -> RunPlan:
    chosen: dict[Role, Entry] = {role: entry for role, entry in plan.chosen.items() if role != "generator"}
    return evolve(plan, chosen=chosen, channel=None)


@contextmanager
def _backends(plan: RunPlan, rows: Sequence[Row] = ()) -> Iterator[Backends]:
    tokenizer = tokenizers().load_tokenizer(plan.recipe.model)
    plan.algorithm.read_rows(rows, tokenizer)
    with execution(_without_generator(plan), tokenizer, None, Progress()) as opened, opened() as backends:
        yield backends


def _loop(
    bundle: Bundle,
    plan: RunPlan,
    backends: Backends,
    samples: CollectedRollouts,
    keeper: Keeper,
    progress: Progress,
    version: int,
) -> Loop:
    """The loop of a run in front of the step."""
    clock = PhaseClock(progress)
    reference, trainer = Reference.of(backends), RecordedTrainer(backends.trainer, keeper.notes)
    scorers: list[Any] = [*scorers_of(plan.algorithm, reference, trainer, clock)]
    if plan.algorithm.needs.critic:
        scorers.append(RecordedValues(columns={"values": bundle.scored["values"]}))
    policy = PolicyLearner(
        trainer=trainer,
        algorithm=plan.algorithm,
        reference=reference,
        monitor=MismatchMonitor(
            trainer=trainer, writer=None, progress=progress, warn_above=float("inf"), end_above=float("inf")
        ),
        clock=clock,
        has_dropout=plan.recipe.lora is not None and plan.recipe.lora.dropout > 0,
        samples_truncated=plan.recipe.rollout.truncates,
        num_warmup_steps=plan.critic_warmup_steps,
    )
    return Loop(
        recipe=evolve(plan.recipe, run=evolve(plan.recipe.run, num_steps=bundle.step)),
        algorithm=plan.algorithm,
        source=RecordedSamples(samples),
        scorers=scorers,
        learners=[policy],
        weights=WeightSync(),
        saver=_NoSaver(),
        observers=[keeper],
        progress=progress,
        clock=clock,
        guard=InterruptGuard(),
        position=LoopPosition(step=bundle.step - 1, weight_version=version, step_version=version, saved_step=-1),
    )


def _at_version(samples: CollectedRollouts, version: int) -> CollectedRollouts:
    """The samples as they are where the weights of the step count as this version."""
    shift = version - samples.weight_version
    if not shift:
        return samples
    versions = samples.batch.token_columns["weight_versions"]
    moved = (versions + (versions >= 0) * shift).astype(versions.dtype)
    batch = evolve(samples.batch, token_columns={**samples.batch.token_columns, "weight_versions": moved})
    oldest = samples.oldest_version and samples.oldest_version + shift
    return evolve(samples, batch=batch, weight_version=version, oldest_version=oldest)


class _NoSaver:
    """Saves nothing."""

    can_save = False

    def save(self, position: LoopPosition, rollouts: bytes | None, *, prune: bool) -> None:
        """See Saver."""

    def completed(self, *, wait: bool) -> int | None:  # noqa: ARG002
        """See Saver."""
        return None

    def export_to(self, final: Path, kind: Literal["hf", "peft"] = "hf") -> Path:  # noqa: ARG002
        """See Saver."""
        return final
