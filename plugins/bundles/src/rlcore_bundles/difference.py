"""Compares a step with the same step computed again, quantity by quantity, in the order in which they follow from each other.

A difference is rounding where it is within `FACTOR` times the greatest one that rounding every weight once brings, or within a
few units of float32. Each bound is measured on the very step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from attrs import evolve, frozen

from rlcore.reading import parse_toml
from rlcore.run.protocols import CollectedRollouts
from rlcore.spi import ADVANTAGES, GENERATION_LOGPROBS, WEIGHT_VERSIONS, TurnRewards
from rlcore.spi.arrays import AnyArray, BoolArray, Int64Array
from rlcore_bundles.bundle import Bundle, Update
from rlcore_bundles.recomputed_rewards import OWN_LOOP, Rewards
from rlcore_bundles.recorded_groups import tokens_of
from rlcore_bundles.replaying import Replayed
from rlcore_bundles.rows import FACTOR, Row, place_of

PROMPTS, REWARD = "prompt tokens", "reward"
GENERATOR = "generator's log-probabilities"
MINIBATCHES = "minibatches"


@frozen(kw_only=True, eq=False)
class Values:
    """The numbers of one quantity, [n]."""

    name: str
    numbers: AnyArray
    place: Callable[[int], str]
    scale: float = 0.0
    """The sum of absolute parts, of a quantity that is a sum."""


def compare(
    recorded: Bundle,
    replayed: Replayed,
    perturbed: Sequence[Replayed],
    rewards: Rewards | str,
    *,
    whole: bool,
    unperturbed: Replayed | None = None,
) -> list[Row]:
    """Compare all quantities of a step. `rewards`: those computed again, or why there are none. `whole`: the replay began with
    the optimizer's state, so that updates after the first can be compared. `unperturbed` is the replay whose weights were
    perturbed, where that is not `replayed`."""
    base = unperturbed or replayed
    rows = list(_episode_rows(recorded, rewards))
    if recorded.own_step is None:
        rows.append(_generator_row(recorded, replayed, base, perturbed))
    else:
        rows.append(Row(quantity=GENERATOR, verdict="not compared", reason=OWN_LOOP))
        rows.append(_start_row(recorded, replayed.bundle))
    bundles = with_common_names([recorded, replayed.bundle, base.bundle, *(one.bundle for one in perturbed)])
    recorded, own, start, *others = bundles
    if recorded.own_step is None:
        rows.append(_set_row(recorded, own))
    else:
        rows.append(Row(quantity=MINIBATCHES, verdict="not compared", reason=OWN_LOOP))
    if rows[-1].verdict == "differs":
        return rows
    every = [dict(quantities(one, recorded)) for one in (recorded, own, start, *others)]
    first, second, middle, *rest = every
    for name, values in first.items():
        if recorded.own_step is not None and not name.startswith("update "):
            rows.append(Row(quantity=name, verdict="not compared", reason=OWN_LOOP))
        elif not whole and name.startswith("update ") and not name.startswith("update 1:"):
            rows.append(Row(quantity=name, verdict="not compared", reason="the optimizer's state is not in the bundle"))
        elif name not in second:
            rows.append(Row(quantity=name, verdict="not compared", reason="the replay's trainer does not return it"))
        else:
            moved = [one[name].numbers for one in rest if name in one]
            rows.append(_row(values, second[name].numbers, _bound(middle.get(name), moved)))
    chain = [row for row in rows if row.quantity != GENERATOR]
    rows.append(_digest_row(recorded, own, whole, any(row.verdict == "rounding" for row in chain)))
    return rows


def with_common_names(bundles: Sequence[Bundle]) -> list[Bundle]:
    """The bundles with those metrics and gradients of each update alone that all have: trainers may report others."""
    common = [_common(updates) for updates in zip(*(one.updates for one in bundles), strict=False)]
    return [
        evolve(
            bundle,
            updates=[*(of(one) for of, one in zip(common, bundle.updates, strict=False)), *bundle.updates[len(common) :]],
        )
        for bundle in bundles
    ]


def _common(updates: Sequence[Update]) -> Callable[[Update], Update]:
    """A function that leaves out of an update what not all of these have."""
    names = set.intersection(*(set(one.metrics) for one in updates))
    norms = [one.gradient_norms for one in updates]
    tensors = None if any(one is None for one in norms) else set.intersection(*(set(one or ()) for one in norms))

    def of(update: Update) -> Update:
        kept = {name: value for name, value in update.metrics.items() if name in names}
        gradients = {name: value for name, value in (update.gradient_norms or {}).items() if name in (tensors or ())}
        return evolve(update, metrics=kept, gradient_norms=gradients if tensors else None)

    return of


def first_difference(rows: Sequence[Row]) -> Row | None:
    """The first quantity that differs; None where none does."""
    return next((row for row in rows if row.verdict == "differs"), None)


def _bound(unperturbed: Values | None, perturbed: Sequence[AnyArray]) -> float:
    """The distance by which rounding moves the numbers of a quantity."""
    if unperturbed is None:
        return 0.0
    before = unperturbed.numbers.astype(np.float64)
    moved = [float(np.nanmax(np.abs(one - before), initial=0.0)) for one in perturbed if len(one) == len(before)]
    return FACTOR * max(moved, default=0.0)


def _row(values: Values, found: AnyArray, bound: float = 0.0) -> Row:
    """The comparison of the numbers of a quantity."""
    return Row.of(values.name, {"recorded": values.numbers, "replayed": found}, bound, values.place, values.scale)


def _episode_rows(recorded: Bundle, rewards: Rewards | str) -> Iterator[Row]:
    """Yield the rows of the episodes: the tokens of prompts and of what the environment showed, and the rewards."""
    if isinstance(rewards, str):
        yield Row(quantity=PROMPTS, verdict="not compared", reason=rewards)
        yield Row(quantity=REWARD, verdict="not compared", reason=rewards)
        return
    sampled, again = recorded.sampled, rewards.samples
    judged = np.flatnonzero(sampled.valid)
    yield _prompt_row(sampled, rewards, judged.tolist())
    if len(again.rewards) != len(sampled.rewards):
        return

    def place(index: int) -> str:
        return f"sample {judged[index]}{rewards.remark(int(judged[index]))}"

    pairs = {REWARD: (sampled.rewards, rewards.rewards)}
    pairs |= {
        f"{REWARD}/{name}": (column, again.reward_components.get(name, np.zeros(len(column), np.float32)))
        for name, column in sampled.reward_components.items()
    }
    for name, (before, after) in pairs.items():
        yield _row(Values(name=name, numbers=before[judged], place=place), after[judged])
    if sampled.turns is not None and again.turns is not None:
        yield _turn_row(sampled.turns, again.turns, np.flatnonzero(sampled.valid[sampled.first_sequences]), sampled)


def _prompt_row(sampled: CollectedRollouts, rewards: Rewards, judged: Sequence[int]) -> Row:
    """The tokens of all valid samples, of which the policy's are the recorded answers."""
    before, after = sampled.batch, rewards.samples.batch
    count = int(before.lengths[judged].sum())
    if before.num_sequences != after.num_sequences:
        where = f"recorded {before.num_sequences} sequences, replayed {after.num_sequences}"
        return Row(quantity=PROMPTS, verdict="differs", count=count, where=where)
    for number in judged:
        one, other = (batch.tokens[batch.offsets[number] : batch.offsets[number + 1]] for batch in (before, after))
        if np.array_equal(one, other):
            continue
        shared = min(len(one), len(other))
        place = int(np.flatnonzero(np.append(one[:shared] != other[:shared], True))[0])
        tokens = [int(row[place]) if place < len(row) else "none" for row in (one, other)]
        where = (
            f"sample {number}, token {place}: recorded {tokens[0]}, replayed {tokens[1]}, "
            f"of {len(one)} and {len(other)}{rewards.remark(number)}"
        )
        return Row(quantity=PROMPTS, verdict="differs", count=count, where=where)
    return Row(quantity=PROMPTS, verdict="equal", count=count)


def _turn_row(before: TurnRewards, after: TurnRewards, judged: Int64Array, sampled: CollectedRollouts) -> Row:
    """The rewards of the turns of valid episodes, int64 [J]. Their first sequences name them."""
    name, first = f"{REWARD} of a turn", sampled.first_sequences
    counts = np.diff(before.offsets)
    if not np.array_equal(counts[judged], np.diff(after.offsets)[judged]):
        number = int(judged[np.flatnonzero(counts[judged] != np.diff(after.offsets)[judged])[0]])
        where = f"sample {first[number]}: recorded {counts[number]} turns, replayed {np.diff(after.offsets)[number]}"
        return Row(quantity=name, verdict="differs", count=len(before.rewards), where=where)
    owners = np.repeat(np.arange(len(counts)), counts)
    kept = np.flatnonzero(np.isin(owners, judged))
    others = np.flatnonzero(np.isin(np.repeat(np.arange(len(counts)), np.diff(after.offsets)), judged))

    def place(index: int) -> str:
        owner = int(owners[kept[index]])
        return f"sample {first[owner]}, turn {kept[index] - before.offsets[owner] + 1}"

    return _row(Values(name=name, numbers=before.rewards[kept], place=place), after.rewards[others])


def _generator_row(recorded: Bundle, replayed: Replayed, base: Replayed, perturbed: Sequence[Replayed]) -> Row:
    """The generator's log-probabilities beside the trainer's, of tokens whose weights were there."""
    batch = recorded.sampled.batch
    mask = batch.loss_mask & np.isin(batch.token_columns[WEIGHT_VERSIONS], sorted(replayed.versions))
    place = token_place(batch, mask)
    values = Values(name=GENERATOR, numbers=batch.token_columns[GENERATION_LOGPROBS][mask], place=place)
    start = Values(name=GENERATOR, numbers=base.start_logprobs[batch.loss_mask], place=place)
    bound = _bound(start, [one.start_logprobs[batch.loss_mask] for one in perturbed])
    return _row(values, replayed.sampled_logprobs[mask], bound)


def _set_row(recorded: Bundle, own: Bundle) -> Row:
    """The sequences of the training batch, and those of each update."""
    before = [recorded.trained.offsets, *(one.sequences for one in recorded.updates)]
    after = [own.trained.offsets, *(one.sequences for one in own.updates)]
    name = MINIBATCHES
    if len(before) != len(after):
        where = f"recorded {len(before) - 1} updates, replayed {len(after) - 1}"
        return Row(quantity=name, verdict="differs", count=len(before), where=where)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        if not np.array_equal(one, other):
            of = "the training batch" if number == 0 else f"update {number}"
            where = f"{of}: recorded {len(one)} sequences, replayed {len(other)}, or other ones"
            return Row(quantity=name, verdict="differs", count=len(before), where=where)
    return Row(quantity=name, verdict="equal", count=sum(map(len, before)))


def quantities(bundle: Bundle, recorded: Bundle) -> Iterator[tuple[str, Values]]:
    """Yield the quantities of a step's batch and updates, in order."""
    trained, mask = bundle.trained, recorded.trained.loss_mask
    for name in sorted(trained.token_columns.keys() - {GENERATION_LOGPROBS, WEIGHT_VERSIONS, "routed_experts"}):
        column = trained.token_columns[name]
        yield name, Values(name=name, numbers=column[mask], place=token_place(recorded.trained, mask))
    for number, update in enumerate(bundle.updates, start=1):
        for values in _of_update(update, bundle, recorded, f"update {number}:"):
            yield values.name, values


def _of_update(update: Update, bundle: Bundle, recorded: Bundle, prefix: str) -> Iterator[Values]:
    """Yield the quantities of an update, in order."""
    trained = recorded.trained
    mask = trained.loss_mask & tokens_of(trained, update.sequences)
    place = token_place(trained, mask)
    for name in sorted(update.columns):
        yield Values(name=f"{prefix} {name}", numbers=update.columns[name][mask], place=place)
    if update.logprobs is not None:
        yield Values(name=f"{prefix} log-probabilities", numbers=update.logprobs[mask], place=place)
        before = update.columns.get("previous_logprobs", bundle.trained.token_columns.get(GENERATION_LOGPROBS))
        if before is not None:
            ratios = np.exp(np.clip(update.logprobs[mask].astype(np.float64) - before[mask], -50, 50))
            yield Values(name=f"{prefix} ratios", numbers=ratios, place=place)
    weights = trained.token_columns.get(ADVANTAGES)
    scale = 0.0 if weights is None or not mask.any() else float(np.abs(weights[mask]).mean())
    yield evolve(_single(f"{prefix} loss", update.loss_value), scale=scale)
    if update.gradient_norms is not None:
        yield _named(f"{prefix} gradient of a tensor", update.gradient_norms)
    yield _single(f"{prefix} gradient norm", update.grad_norm)
    most = _max_grad_norm(bundle)
    yield _single(f"{prefix} clip", min(1.0, most / update.grad_norm) if most and update.grad_norm else 1.0)
    yield _single(f"{prefix} learning rate", update.learning_rate)
    yield _named(f"{prefix} metrics", update.metrics)


def _max_grad_norm(bundle: Bundle) -> float:
    """The norm to which gradients are clipped; 0.0 clips nothing."""
    given = None if bundle.own_step is None else bundle.own_step.settings.max_grad_norm
    most: float = parse_toml(bundle.recipe)["optimizer"]["max_grad_norm"] if given is None else given
    return most


def _start_row(recorded: Bundle, own: Bundle) -> Row:
    """The weights that the replay of an own loop's step begins with."""
    name, before, after = "weights before the step", recorded.digests_before, own.digests_before
    if not before or not after:
        reason = "weights of another dtype have other digests" if before else "the bundle has no digests of them"
        return Row(quantity=name, verdict="not compared", reason=reason)
    if "lora" in parse_toml(recorded.recipe):
        return Row(quantity=name, verdict="not compared", reason="trainers round merged adapters differently")
    return digests_row(name, before, after, rounded=False)


def digests_row(name: str, before: Mapping[str, int], after: Mapping[str, int], *, rounded: bool) -> Row:
    """The tensors whose digests differ. `rounded`: a quantity before them was rounded."""
    other = [one for one, digest in before.items() if after.get(one) != digest]
    if not other:
        return Row(quantity=name, verdict="equal", count=len(before))
    where = f"{len(other)} of {len(before)} tensors, the first {other[0]}"
    return Row(quantity=name, verdict="rounding" if rounded else "differs", count=len(before), where=where)


def _digest_row(recorded: Bundle, own: Bundle, whole: bool, rounded: bool) -> Row:
    name = "weights after the step"
    if not recorded.digests_after:
        return Row(quantity=name, verdict="not compared", reason="the bundle has no digests of them")
    if not whole:
        return Row(quantity=name, verdict="not compared", reason="the optimizer's state is not in the bundle")
    if not own.digests_after:
        return Row(quantity=name, verdict="not compared", reason="weights of another dtype have other digests")
    return digests_row(name, recorded.digests_after, own.digests_after, rounded=rounded)


def _single(name: str, value: float) -> Values:
    return Values(name=name, numbers=np.array([value]), place=lambda _: "the update")


def _named(name: str, values: Mapping[str, float]) -> Values:
    names = sorted(values)
    return Values(name=name, numbers=np.array([values[one] for one in names]), place=lambda index: names[index])


def token_place(batch: object, mask: BoolArray) -> Callable[[int], str]:
    """A function that names the place of a loss token."""
    places = np.flatnonzero(mask)
    offsets = batch.offsets  # type: ignore[attr-defined]

    def place(index: int) -> str:
        return "sample {}, token {}".format(*place_of(offsets, int(places[index])))

    return place
