"""A recorded run held against the reference: every difference, as a line of text."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from .cases import PARTIAL_CREDIT, SAMPLES_PER_PROMPT, Case
from .recorded import Part, RecordedRun, Sample
from .recorded import Sequence as SeenSequence
from .reference_run import ExpectedSample, ExpectedStep, ExpectedUpdate, ReferenceRun

OF_FIRST_UPDATE = ("token_mult_prob_error", "generation_kl_error", "importance_ratio", "async/tokens_compared")
"""A step's line in metrics.jsonl holds the first update's; of `*_max` the greatest, of the others the mean."""


# How far float32 may be from float64 after so many updates at a large learning rate.
FIGURES = 1e-4
"""Relative, and absolute."""
LOGPROBS = 1e-4
"""In nats."""
MAX_LINES = 30
WEIGHTS = 1e-5
"""Norm of a tensor's difference by the tensor's own."""


def judge(case: Case, run: RecordedRun, model: Path) -> list[ExpectedStep]:
    """What each step has to be, from the model that the run began with; fails where the run is another."""
    reference = ReferenceRun(model, case.options)
    steps = reference.steps(run.samples)
    found = differences(case, run, reference, steps)
    assert not found, "\n".join(found[:MAX_LINES])
    return steps


def differences(case: Case, run: RecordedRun, reference: ReferenceRun, steps: Sequence[ExpectedStep]) -> list[str]:
    """All of them, in the order in which they arise: what the first ones name is the cause, the rest may follow from it."""
    found: list[str] = []
    for number, (step, line) in enumerate(zip(steps, run.metrics, strict=True), start=1):
        found += [f"step {number}: {text}" for text in _samples(case, step)]
        for version, update in enumerate(step.updates, start=step.weight_version):
            if version < len(run.updates):
                found += [f"update {version}: {text}" for text in _update(case, run.updates[version], update)]
        found += [f"metrics of step {number}: {text}" for text in _metrics(line, step)]
    num_updates = sum(len(step.updates) for step in steps)
    if len(run.updates) != num_updates:
        found.append(f"{len(run.updates)} updates; expected {num_updates}")
    return [*found, *_weights(run.weights, reference.weights)]


def _samples(case: Case, step: ExpectedStep) -> Iterator[str]:
    """Whether the samples are those of the weights that they name, none of them too old, and rewarded for what they say."""
    distances = [
        float(np.abs(own.sample.generation_logprobs - own.drawn_from.numpy())[own.sample.loss_mask].max())
        for own in step.samples
    ]
    if not max(distances) <= LOGPROBS:
        yield f"generation_logprobs are off by up to {max(distances):.2g}"
    groups = Counter((expected.sample.group, expected.sample.prompt) for expected in step.samples)
    sizes = {SAMPLES_PER_PROMPT, 2 * SAMPLES_PER_PROMPT} if case.grows else {SAMPLES_PER_PROMPT}
    if not set(groups.values()) <= sizes or len({group for group, _ in groups}) != len(groups):
        yield f"samples by group and prompt: {dict(groups)}; expected {sizes} of one prompt in each group"
    for number, expected in enumerate(step.samples):
        own = expected.sample
        if not own.valid:
            yield f"sample {number}: the environment failed"
        prompt = len(own.prompt)  # a character is a token
        if own.loss_mask.tolist() != [place >= prompt for place in range(len(own.tokens))]:
            yield f"sample {number}: loss_mask {own.loss_mask.tolist()} after a prompt of {prompt} tokens"
        said = own.weight_versions[own.loss_mask]
        oldest = 0 if case.on_stale == "rescore" else step.oldest_version
        in_bound = ((oldest <= said) & (said <= step.weight_version)).all()
        in_order = (np.diff(said) >= 0).all()
        if not in_bound or not in_order or not (own.weight_versions[~own.loss_mask] == -1).all():
            found, versions = own.weight_versions.tolist(), f"{oldest} to {step.weight_version}"
            yield f"sample {number}: weight versions {found}; expected {versions}, in order"
        if abs(own.reward - _reward(own)) > 1e-6:
            yield f"sample {number}: reward {own.reward} for {own.prompt}{own.response}; expected {_reward(own)}"


def _reward(sample: Sample) -> float:
    """1 for the sum, else the partial credit times the share of digits that are right, counted from the last."""
    answer = str(sum(int(term) for term in sample.prompt.rstrip("=").split("+")))
    response = sample.response
    if response == answer:
        return 1.0
    if not response.isdigit():
        return 0.0
    right = sum(one == other for one, other in zip(response[::-1], answer[::-1], strict=False))
    return PARTIAL_CREDIT * right / max(len(response), len(answer))


def _update(case: Case, parts: Sequence[Part], expected: ExpectedUpdate) -> Iterator[str]:
    if len(parts) != case.ranks:
        yield f"{len(parts)} ranks took part; expected {case.ranks}"
    if len({len(part.microbatches) for part in parts}) != 1:
        yield f"microbatches of the ranks: {[len(part.microbatches) for part in parts]}; expected as many of each"
    masks = [own.sample.loss_mask for own in expected.samples]
    counts = (sum(int(mask.sum()) for mask in masks), sum(bool(mask.any()) for mask in masks), case.options.temperature)
    for part in parts:
        if (part.num_loss_tokens, part.num_loss_sequences, part.temperature) != counts:
            found = (part.num_loss_tokens, part.num_loss_sequences, part.temperature)
            yield f"loss tokens, loss sequences and temperature are {found}; expected {counts}"
        yield from _figures(part.figures, expected.figures)
    microbatches = [batch for part in parts for batch in part.microbatches]
    for batch in microbatches:
        size = sum(len(sequence.tokens) for sequence in batch)
        if size > case.max_microbatch_tokens and len(batch) > 1:
            yield f"a microbatch of {size} tokens"
    yield from _sequences(case, [sequence for batch in microbatches for sequence in batch], expected)


def _sequences(case: Case, seen: Sequence[SeenSequence], expected: ExpectedUpdate) -> Iterator[str]:
    """Whether the ranks together saw each sequence once, with its mask and columns. One without a loss token only keeps a rank
    busy."""
    counted = [sequence for sequence in seen if sequence.loss_mask.any()]
    key_of = _key_of_tokens if case.on_stale == "rescore" else _key
    found, wanted = Counter(map(key_of, counted)), Counter(key_of(own.sample) for own in expected.samples)
    if found != wanted:
        strange, missing = found - wanted, wanted - found
        yield f"of groups {_groups(wanted)}: {missing.total()} sequences are missing, {strange.total()} are not of them"
    by_key = {key_of(own.sample): own for own in expected.samples if wanted[key_of(own.sample)] == 1}
    for sequence in counted:
        if key_of(sequence) in by_key:
            yield from _columns(case, sequence, by_key[key_of(sequence)], expected.is_first)


def _key(own: Sample | SeenSequence) -> tuple[int, bytes, bytes]:
    return own.key


def _key_of_tokens(own: Sample | SeenSequence) -> tuple[int, bytes, bytes]:
    """Where the generator's log-probabilities are not those that the trainer is given."""
    return own.group, own.tokens.tobytes(), b""


def _columns(case: Case, seen: SeenSequence, expected: ExpectedSample, is_first: bool) -> Iterator[str]:
    mask = expected.sample.loss_mask
    if seen.loss_mask.tolist() != mask.tolist():
        yield f"loss_mask {seen.loss_mask.tolist()}; expected {mask.tolist()}"
    wanted = {
        "advantages": (np.full(len(mask), expected.advantage), 1e-5),
        "generation_logprobs": (expected.generation.numpy(), LOGPROBS),
    }
    if case.previous == "trainer" and not is_first:
        wanted["previous_logprobs"] = expected.at_step_start.numpy(), LOGPROBS
    if case.kl:
        wanted["reference_logprobs"] = expected.reference.numpy(), LOGPROBS
    for name, (values, most) in wanted.items():
        if name not in seen.columns:
            yield f"{name} are missing"
        elif not (distance := np.abs(seen.columns[name] - values)[mask].max()) <= most:
            yield f"{name} of a sequence of group {seen.group} are off by {distance:.2g}"


def _figures(found: Mapping[str, float], expected: Mapping[str, float]) -> Iterator[str]:
    for name, value in expected.items():
        if name not in found:
            yield f"{name} is missing; expected {value}"
        elif not abs(found[name] - value) <= FIGURES * max(1.0, abs(value)):
            yield f"{name} is {found[name]}; expected {value}"


def _metrics(line: Mapping[str, float], step: ExpectedStep) -> Iterator[str]:
    updates = [{**update.figures, **update.compared} for update in step.updates]
    expected = {"updates": len(updates), "weight_version": step.weight_version + len(updates)}
    for name in updates[0] if updates else ():
        values = [figures[name] for figures in updates if name in figures]
        if name in OF_FIRST_UPDATE:
            expected[name] = values[0]
        else:
            expected[name] = max(values) if name.endswith("_max") else float(np.mean(values))
    yield from _figures(line, expected)
    unmeasured = [name for name in OF_FIRST_UPDATE if name in line and name not in expected]
    if updates and unmeasured:
        yield f"{', '.join(unmeasured)} are there, though too few tokens are of the trainer's distribution"


def _weights(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> Iterator[str]:
    if found.keys() != expected.keys():
        yield f"weights {sorted(found.keys() ^ expected.keys())} are on one side alone"
        return
    for name, tensor in expected.items():
        distance = float((found[name].double() - tensor).norm() / tensor.norm())
        if not distance <= WEIGHTS:
            yield f"{name} is off by {distance:.2g} of its norm"


def _groups(keys: Counter[tuple[int, bytes, bytes]]) -> list[int]:
    return sorted({group for group, _, _ in keys})
