"""The collector's part of the conformance kit: whole runs of the fakes, whose samples it collects."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rlcore.registry.run_parts import CollectorEntry
from rlcore.run.evaluate import evaluate
from rlcore.run.plan.prepare import prepare
from rlcore.run.protocols import CollectedRollouts, LoopObserver, TrainedStep
from rlcore.run.report.progress import Progress
from rlcore.spi import GENERATION_LOGPROBS, WEIGHT_VERSIONS, CollectorProvider
from rlcore.testing.fakes import FakeTokenizer
from rlcore_conformance.fake_runs import FakeRun, FakeRuns, fakes


class _Keeps(LoopObserver):
    """Keeps the samples of each step."""

    def __init__(self) -> None:
        self.samples: list[CollectedRollouts] = []

    def on_step_trained(self, step: TrainedStep) -> Mapping[str, float]:
        """See LoopObserver."""
        assert isinstance(step.sampled, CollectedRollouts), f"step {step.step} has a {type(step.sampled).__name__}"
        self.samples.append(step.sampled)
        return {}


class CollectorConformance(FakeRuns):
    """Checks of every collector of episodes, those that turns of generator and environment make::

        class TestMine(CollectorConformance):
            @pytest.fixture
            def provider(self): return TREE

    Fixtures to override where the default does not fit: `overrides`, KEY=VALUE of the recipe.
    """

    @pytest.fixture
    def provider(self) -> CollectorProvider:
        """The collector under test: override it."""
        pytest.fail("override the fixture `provider` to return the CollectorProvider under test", pytrace=False)

    @pytest.fixture
    def entry(self, provider: CollectorProvider) -> CollectorEntry:
        """The collector as an installed one."""
        return CollectorEntry(name=provider.name, distribution="kit", version="1").holding(provider)

    @pytest.fixture
    def collect(self, run: FakeRun, entry: CollectorEntry, monkeypatch: pytest.MonkeyPatch) -> FakeRun:
        """Runs the recipe with the collector."""
        if entry.provider is not None and "episodes" not in entry.provider.runs:
            pytest.skip("it collects for other runs")
        monkeypatch.setattr("rlcore.run.plan.collector.collector", lambda kind: entry)  # noqa: ARG005
        return run

    @pytest.fixture
    def samples(self, monkeypatch: pytest.MonkeyPatch) -> list[CollectedRollouts]:
        """The samples of each step, once a run is over."""
        kept = _Keeps()
        entry = SimpleNamespace(call=lambda name, run: kept)  # noqa: ARG005
        monkeypatch.setattr("rlcore.run.observers.wanted_observers", lambda recipe: (entry,))  # noqa: ARG005
        return kept.samples

    def test_the_description(self, entry: CollectorEntry) -> None:
        """It has no faults, and its functions are there."""
        assert entry.error is None
        assert entry.unavailable() is None

    def test_steps_have_their_samples(self, collect: FakeRun, samples: list[CollectedRollouts]) -> None:
        """Each step has as many groups as the recipe asks for, each with as many samples, side by side."""
        collect("training.prompts_per_step=3", "rollout.samples_per_prompt=4")
        assert len(samples) == 3
        for step, found in enumerate(samples, start=1):
            first = found.group_ids[found.first_sequences]
            assert first.tolist() == np.repeat(range(3), 4).tolist(), f"step {step}: the samples are of groups {first.tolist()}"

    def test_tokens_are_the_policys(self, collect: FakeRun, samples: list[CollectedRollouts]) -> None:
        """The present weights have sampled each learned token, with its log-probability; there are such tokens."""
        collect("training.minibatches_per_step=1")
        assert samples
        for step, found in enumerate(samples):
            learned = found.batch.loss_mask
            assert learned.any(), f"step {step + 1} has no token to learn"
            versions = set(found.batch.token_columns[WEIGHT_VERSIONS][learned].tolist())
            assert versions == {step}, f"step {step + 1} learns from tokens of the weights {versions}; expected {step}"
            logprobs = found.batch.token_columns[GENERATION_LOGPROBS]
            assert (logprobs[learned] <= 1e-6).all()
            assert not logprobs[~learned].any(), "tokens that the policy has read have log-probabilities"

    def test_rewards_are_the_environments(self, collect: FakeRun, samples: list[CollectedRollouts]) -> None:
        """Each sample has the reward of its response, here the share of a letter."""
        collect()
        assert samples
        for found in samples:
            shares = [text.count("e") / max(len(text), 1) for text in found.responses]
            assert found.rewards[found.first_sequences] == pytest.approx(shares)

    def test_the_same_run_has_the_same_samples(self, collect: FakeRun) -> None:
        """Figures follow from the recipe's seed."""
        for once, again in zip(collect(name="once"), collect(name="again"), strict=True):
            assert once == pytest.approx(again, nan_ok=True)

    def test_a_resumed_run_is_one_that_went_on(self, collect: FakeRun) -> None:
        """A run that resumes from a checkpoint collects the samples that would have come."""
        collect(steps=2, name="stopped")
        resumed, expected = collect(steps=3, name="stopped", resume=True), collect(name="whole")
        assert resumed[-1] == pytest.approx(expected[-1], nan_ok=True)

    def test_held_out_rows_are_measured(self, collect: FakeRun, overrides: tuple[str, ...], tmp_path: Path) -> None:
        """In training as `[evaluation]` says, and alone: the figures are named eval/…, and none is another's."""
        figures = {name for step in collect() for name in step if name.startswith("eval/")}
        assert figures, "no figure is named eval/…"
        assert self.evaluated(tmp_path, overrides) >= figures

    def test_the_environment_is_closed(self, collect: FakeRun, tmp_path: Path) -> None:
        """The collector closes it, which nothing else does."""
        collect()
        assert (tmp_path / "environment-closed").exists(), "the environment was not closed"

    @staticmethod
    def evaluated(folder: Path, overrides: tuple[str, ...]) -> set[str]:
        """The names of the figures that an evaluation alone has."""
        keys = (f"trainer.fake.folder={folder}", f"environment.fake.folder={folder}", *overrides)
        plan = prepare(folder / "recipe.toml", keys, registry=fakes(), evaluating=True)
        found = evaluate(plan, checkpoint=None, progress=Progress(), tokenizer=FakeTokenizer())
        assert all(name.startswith("eval/") for name in found), f"found the figures {', '.join(found)}"
        return set(found)
