"""A bundle's samples, and one of its updates, in the form in which both sides of a comparison read them.

Shapes: N sequences, each from its first loss token on and padded on the right to R tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import torch
from attrs import evolve, frozen
from numpy.typing import NDArray
from torch import Tensor

from rlcore.reading import parse_toml
from rlcore.spi import ADVANTAGES, EPISODE_IDS, GENERATION_LOGPROBS, PREVIOUS_LOGPROBS, REFERENCE_LOGPROBS, ConfigError, Problem
from rlcore.spi.arrays import AnyArray, Int64Array
from rlcore_bundles.bundle import Bundle
from rlcore_bundles.bundle import Update as RecordedUpdate
from rlcore_bundles.own_side import LOSS, OwnSide
from rlcore_bundles.peers.contract import Samples, Setup, Update
from rlcore_torchkit.rl.loss_config import AdvantageNormalisation, Baseline, LossConfig
from rlcore_torchkit.rl.shaping import group_length_reward, linear_length_penalty, soft_overlong_penalty

BatchT = TypeVar("BatchT", Samples, Update)
SEED = 0
NAMED: Mapping[str, Any] = {
    "advantage_baseline": Baseline,
    "advantage_normalisation": AdvantageNormalisation,
    "length_penalty": Literal["none", "soft_overlong", "linear", "group"],
    "advantage_per": Literal["episode", "turn", "process"],
    "reward_aggregation": Literal["sum", "normalise_then_sum"],
    "kl_placement": Literal["loss", "reward", "reward_to_go"],
    **{name: hint for name, hint in get_type_hints(LossConfig).items() if get_origin(hint) is Literal},
}
"""The options that have names as values."""


@frozen(kw_only=True, eq=False)
class Rows:
    """The sequences of a padded batch."""

    numbers: Int64Array
    """int64 [N]: the number of each in the training batch."""
    starts: Int64Array
    """int64 [N]: the place of its first loss token in it."""
    mask: NDArray[np.bool_]
    """bool [N, R]"""

    def place(self, index: int) -> str:
        """The place of a loss token by its number among all of them."""
        row, column = (int(one[index]) for one in np.nonzero(self.mask))
        return f"sample {self.numbers[row]}, token {self.starts[row] + column}"


@frozen(kw_only=True, eq=False)
class ComparedBatch:
    """The input of both sides of a comparison."""

    own: OwnSide
    setup: Setup
    sample_rows: Rows | None = None
    update_rows: Rows | None = None
    reasons: Mapping[str, str]
    """The reasons why "advantages" or "loss" cannot be compared."""
    notes: Sequence[str] = ()


def batch_of(bundle: Bundle, number: int | None, changes: Mapping[str, Any], *, moved_by: float = 0.0) -> ComparedBatch:
    """The batch of a bundle and one of its updates, counted from 1; None is the last. `changes`: options of the algorithm in
    place of the bundle's. `moved_by`: nats, the size of a normal number that is added to each log-probability of the policy.
    ConfigError for what no comparison can be made of."""
    if problems := list(_problems(bundle, number)):
        raise ConfigError(problems)
    update = bundle.updates[-1 if number is None else number - 1]
    options = dict(update.loss_config)
    changes = changed_options(options, changes)
    reasons = {name: why for name, why in (("advantages", _no_advantages(bundle)), ("loss", _no_loss(bundle, update))) if why}
    recipe = parse_toml(bundle.recipe)
    rollout = recipe.get("rollout", {})
    longest = int(bundle.trained.loss_lengths.max(initial=1))
    setup = Setup(
        options={**options, **changes},
        samples_per_prompt=int(rollout.get("samples_per_prompt", _largest_group(bundle))),
        max_response_tokens=int(rollout.get("max_response_tokens", longest)),
        masks_truncated=rollout.get("on_truncation", "train") == "mask",
    )
    own, sample_rows, update_rows = OwnSide(samples=None, options=options), None, None
    if "advantages" not in reasons:
        samples, recorded, sample_rows = _samples(bundle, setup)
        own = evolve(own, samples=samples, recorded=recorded)
    if "loss" not in reasons:
        compared, update_rows = _update(bundle, update, moved_by)
        own = evolve(own, update=compared)
    return ComparedBatch(
        own=own.with_options(**changes),
        setup=setup,
        sample_rows=sample_rows,
        update_rows=update_rows,
        reasons=reasons,
        notes=list(_notes(own)),
    )


def changed_options(options: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a command changes, each checked. ConfigError with every problem."""
    problems, found = [], {}
    for name, value in changes.items():
        names = get_args(NAMED.get(name))
        if name not in options:
            expected = f"an option of the algorithm: {', '.join(sorted(options))}"
            problems.append(Problem(path=name, found="no such option", expected=expected))
        elif names and value not in names:
            problems.append(Problem(path=name, found=repr(value), expected=f"one of {', '.join(names)}"))
        else:
            found[name] = None if value == "none" and not names else value
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not names and not is_number and value != "none" and type(value) is not type(options[name]):
                problems.append(Problem(path=name, found=repr(value), expected="a number, or none"))
    if problems:
        raise ConfigError(problems)
    return found


def as_dtype(side: OwnSide, dtype: torch.dtype) -> OwnSide:
    """The side with floating tensors of a dtype."""
    recorded = None if side.recorded is None else side.recorded.to(dtype)
    samples = None if side.samples is None else batch_as(side.samples, dtype)
    return evolve(
        side, recorded=recorded, samples=samples, update=None if side.update is None else batch_as(side.update, dtype)
    )


def batch_as(batch: BatchT, dtype: torch.dtype) -> BatchT:
    """A batch with floating tensors of a dtype."""
    values = {one.name: getattr(batch, one.name) for one in fields(batch)}
    changed: dict[str, Any] = {
        name: one.to(dtype) for name, one in values.items() if isinstance(one, Tensor) and one.is_floating_point()
    }
    return replace(batch, **changed)


def _problems(bundle: Bundle, number: int | None) -> Iterator[Problem]:
    if not bundle.updates:
        found = "no update: the step had no signal to train on"
        yield Problem(path="BUNDLE", found=found, expected="an optimizer step", remedy="Record another step.")
        return
    if number is not None and not 1 <= number <= len(bundle.updates):
        yield Problem(path="--update", found=str(number), expected=f"an update of the step, from 1 to {len(bundle.updates)}")
    if ADVANTAGES not in bundle.trained.token_columns:
        found = f"no advantages; the columns are {', '.join(sorted(bundle.trained.token_columns))}"
        yield Problem(path="BUNDLE", found=found, expected="a step of an algorithm that has them, such as grpo")
    elif (loss := bundle.updates[0].loss) != LOSS:
        yield Problem(path="BUNDLE", found=f"the loss {loss}", expected=f"a step of an algorithm with {LOSS}, such as grpo")


def _no_advantages(bundle: Bundle) -> str:
    """The reason why the advantages cannot be computed from one reward a sample; "" where they can."""
    options = bundle.updates[0].loss_config
    sampled, trained = bundle.sampled, bundle.trained
    if "advantage_baseline" not in options:
        return "the algorithm compares no groups"
    if trained.num_sequences != sampled.batch.num_sequences:
        return "the training batch has other sequences than the samples"
    if EPISODE_IDS in sampled.batch.sequence_columns:
        return "an episode has several sequences"
    if options["advantage_per"] != "episode" and sampled.turns is not None:
        return f'advantage_per = "{options["advantage_per"]}": each turn has a reward'
    if options["reward_aggregation"] != "sum":
        return "reward components are normalised one by one"
    if options["kl_placement"] != "loss":
        return "the KL divergence is taken off the rewards"
    return ""


def _no_loss(bundle: Bundle, update: RecordedUpdate) -> str:
    """The reason why the loss cannot be computed from the bundle; "" where it can."""
    options = update.loss_config
    if update.logprobs is None:
        return "the bundle has no log-probabilities of the policy; a trainer with the capability step_logprobs records them"
    episodes = bundle.trained.sequence_columns.get(EPISODE_IDS)
    has_segments = episodes is not None and bool((np.diff(episodes) == 0).any())
    if has_segments and options["loss_normalisation"] != "token":
        return f'an episode has several sequences, and loss_normalisation = "{options["loss_normalisation"]}" counts episodes'
    if options["objective"] in ("clip_cov", "kl_cov"):
        return f'the objective "{options["objective"]}" chooses tokens by chance or over the step'
    if options["entropy_minimum"] is not None:
        return "entropy_minimum reads entropies, which no bundle has"
    if options["kl_coefficient"] and REFERENCE_LOGPROBS not in update.columns:
        return "the bundle has no log-probabilities of the reference"
    return ""


def _notes(own: OwnSide) -> Iterator[str]:
    if own.update is None or own.options["objective"] == "policy_gradient":
        return
    previous = own.update.generation if own.options["previous_logprobs"] == "generation" else own.update.previous
    moved = float((own.update.logprobs - previous).abs().max())
    if moved < 1e-3:
        yield (
            f"Every ratio is 1 to within {moved:.1g}: clips and clamps do not act. A later update has other ratios, and "
            "--move 0.5 makes some."
        )


def _largest_group(bundle: Bundle) -> int:
    return int(np.unique(bundle.sampled.group_ids, return_counts=True)[1].max(initial=1))


def _samples(bundle: Bundle, setup: Setup) -> tuple[Samples, Tensor, Rows]:
    """The valid samples, and their recorded advantages."""
    sampled, trained = bundle.sampled, bundle.trained
    numbers = np.flatnonzero(sampled.valid)
    rows = _rows(trained, numbers)
    rewards = sampled.rewards[numbers] + _length_penalties(bundle, setup)[numbers]
    samples = Samples(
        rewards=torch.from_numpy(rewards),
        group_ids=torch.from_numpy(sampled.group_ids[numbers].astype(np.int64)),
        truncated=torch.from_numpy(sampled.truncated[numbers]),
        mask=torch.from_numpy(rows.mask),
    )
    return samples, _padded(trained, rows, trained.token_columns[ADVANTAGES]), rows


def _length_penalties(bundle: Bundle, setup: Setup) -> NDArray[np.float64]:
    """float64 [N]: what the recipe adds to each reward."""
    options, lengths, most = setup.options, bundle.sampled.batch.loss_lengths, setup.max_response_tokens
    match options["length_penalty"]:
        case "soft_overlong":
            found = soft_overlong_penalty(lengths, max_length=most, buffer=options["length_penalty_buffer"] * most)
        case "linear":
            found = linear_length_penalty(lengths, max_length=most)
        case "group":
            found = group_length_reward(lengths, bundle.sampled.rewards, bundle.sampled.group_ids)
        case _:
            found = np.zeros(len(lengths))
    weight: float = options["length_penalty_weight"]
    return weight * found


def _update(bundle: Bundle, update: RecordedUpdate, moved_by: float) -> tuple[Update, Rows]:
    trained = bundle.trained
    rows = _rows(trained, update.sequences)
    assert update.logprobs is not None
    generation = trained.token_columns[GENERATION_LOGPROBS]
    # In the first update of a step the policy is the previous one.
    previous = update.columns.get(PREVIOUS_LOGPROBS, trained.token_columns.get(PREVIOUS_LOGPROBS, update.logprobs))
    if update.loss_config["previous_logprobs"] == "generation":
        previous = generation
    current = _padded(trained, rows, update.logprobs)
    if moved_by:
        noise = torch.randn(current.shape, generator=torch.Generator().manual_seed(SEED))
        current = torch.where(torch.from_numpy(rows.mask), (current + moved_by * noise).clamp(max=0.0), 0.0)
    reference = update.columns.get(REFERENCE_LOGPROBS)
    compared = Update(
        mask=torch.from_numpy(rows.mask),
        logprobs=current,
        previous=_padded(trained, rows, previous),
        generation=_padded(trained, rows, generation),
        reference=current if reference is None else _padded(trained, rows, reference),
        advantages=_padded(trained, rows, trained.token_columns[ADVANTAGES]),
        entropies=torch.zeros_like(current),
        truncated=torch.from_numpy(_truncated(bundle)[update.sequences]),
        num_updates=len(bundle.updates),
        num_step_tokens=sum(one.num_loss_tokens for one in bundle.updates),
    )
    return compared, rows


def _truncated(bundle: Bundle) -> NDArray[np.bool_]:
    """bool [N] of the training batch's sequences; False where they are others than the samples."""
    count = bundle.trained.num_sequences
    return bundle.sampled.truncated if len(bundle.sampled.truncated) == count else np.zeros(count, np.bool_)


def _rows(batch: Any, numbers: Int64Array) -> Rows:
    starts, masks = [], []
    for number in numbers.tolist():
        mask = batch.loss_mask[batch.offsets[number] : batch.offsets[number + 1]]
        marked = np.flatnonzero(mask)
        first, end = (int(marked[0]), int(marked[-1]) + 1) if len(marked) else (0, 0)
        starts.append(first)
        masks.append(mask[first:end])
    whole = np.zeros((len(masks), max(1, *map(len, masks)) if masks else 1), np.bool_)
    for row, mask in zip(whole, masks, strict=True):
        row[: len(mask)] = mask
    return Rows(numbers=numbers, starts=np.array(starts, np.int64), mask=whole)


def _padded(batch: Any, rows: Rows, column: AnyArray) -> Tensor:
    """float32 [N, R]: a column [T] at loss tokens, and 0.0 elsewhere."""
    whole = np.zeros(rows.mask.shape, np.float32)
    for row, number, start, mask in zip(whole, rows.numbers, rows.starts, rows.mask, strict=True):
        first = int(batch.offsets[number] + start)
        here = min(len(row), int(batch.offsets[number + 1]) - first)
        row[:here] = np.where(mask[:here], column[first : first + here], 0.0)
    return torch.from_numpy(whole)
