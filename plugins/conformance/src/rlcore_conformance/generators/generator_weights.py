"""Checks of which weights a generator samples from: those of the last refit, all of them, and no others."""

from pathlib import Path

import numpy as np
import pytest

from rlcore.spi import (
    ContractError,
    LoadStateRequest,
    RefitRequest,
    RlcoreError,
    SaveStateRequest,
    capabilities,
    tensor_digest,
)
from rlcore.spi.arrays import AnyArray
from rlcore_conformance.generators.generator_fixtures import (
    PLAIN,
    GeneratorFixtures,
    GeneratorUnderTest,
    OpenGenerator,
    Question,
    WeightSets,
    assert_same_samples,
    load_reference,
    logprob_errors,
)
from rlcore_conformance.references.fixtures import Device
from rlcore_conformance.references.reference import Reference, ReferencePolicy
from rlcore_conformance.references.tensors import (
    bytes_of,
    copies,
    corrupt_value,
    drop_tensor,
    make_export,
    num_bytes,
    repeat_tensor,
)

CHANGES = {"corrupted": corrupt_value, "dropped": drop_tensor, "repeated": repeat_tensor}


class GeneratorWeights(GeneratorFixtures):
    """Log-probabilities tell the weights apart: those of other weights fail the check by far."""

    def test_nothing_is_generated_before_a_refit(self, fresh: GeneratorUnderTest, question: Question) -> None:
        """A fresh generator holds no weights that count."""
        for version in (0, -1):
            with pytest.raises(RlcoreError):
                fresh.generate(question, version)

    def test_own_weights_are_those_of_the_model(
        self, open_with_own_weights: OpenGenerator, policy: ReferencePolicy, question: Question
    ) -> None:
        """Weights that no trainer sends are there from the start, as version 0."""
        generator = open_with_own_weights()
        result = generator.generate(question, 0)
        assert (result.weight_versions == 0).all()
        generator.assert_logprobs(policy, question, result)

    def test_another_version_is_refused(self, generator: GeneratorUnderTest, question: Question) -> None:
        """A request for another weight version is refused and leaves the generator as it was."""
        for version in (1, -1):
            with pytest.raises(ContractError):
                generator.generate(question, version)
        generator.generate(question, 0)

    @pytest.mark.parametrize("max_bucket_bytes", [1, 1 << 30])
    def test_each_refit_counts(
        self, fresh: GeneratorUnderTest, reference: Reference, weights: WeightSets, question: Question, max_bucket_bytes: int
    ) -> None:
        """After each of several, with the same prompts: nothing computed under old weights is used again."""
        policies = [load_reference(reference, one) for one in weights]
        for version, which in enumerate((1, 0, 1, 1, 0)):
            fresh.refit(weights[which], version, max_bucket_bytes=max_bucket_bytes)
            result = fresh.generate(question, version)
            assert (result.weight_versions == version).all()
            fresh.assert_logprobs(policies[which], question, result, when=f"after refit {version} ")
            stale = logprob_errors(policies[1 - which], question, result, PLAIN)
            assert stale.max() > 10 * fresh.tolerance, "the two sets of weights are too alike to tell a stale one"

    def test_refit_acknowledges_what_it_holds(self, fresh: GeneratorUnderTest, weights: WeightSets) -> None:
        """A digest for every tensor."""
        export = make_export(weights[1], 4)
        result = fresh.handle.refit(RefitRequest(weight_version=4, channel=fresh.channel, weights=export, may_alias=False))
        assert result.weight_version == 4
        assert result.digests == {name: tensor_digest(bytes_of(value)) for name, value in weights[1].items()}

    @pytest.mark.parametrize("change", CHANGES)
    def test_refit_that_went_wrong_is_an_error(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, weights: WeightSets, question: Question, change: str
    ) -> None:
        """Nothing is generated under its version; a refit after it puts things right."""
        with pytest.raises(RlcoreError):
            generator.refit_export(make_export(weights[1], 1, change=CHANGES[change]))
        with pytest.raises(RlcoreError):
            generator.generate(question, 1)
        generator.refit(weights[0], 2)
        generator.assert_logprobs(policy, question, generator.generate(question, 2))

    def test_copies_stay_when_the_trainer_moves_on(
        self, fresh: GeneratorUnderTest, policy: ReferencePolicy, weights: WeightSets, question: Question
    ) -> None:
        """Without may_alias, changing a persistent export's tensors changes nothing."""
        tensors = copies(weights[0])
        fresh.refit_export(make_export(tensors, 0, persistent=True))
        for value in tensors.values():
            value[...] = float("nan")
        fresh.assert_logprobs(policy, question, fresh.generate(question, 0))

    def test_shared_tensors_are_good_for_the_next_refit(
        self, fresh: GeneratorUnderTest, reference: Reference, weights: WeightSets, question: Question
    ) -> None:
        """With may_alias, tensors that change in place are taken over anew by each refit, which leaves them as they are."""
        tensors = copies(weights[0])
        for version, which in enumerate((0, 1, 0)):
            for name, value in tensors.items():
                value[...] = weights[which][name]
            fresh.refit_export(make_export(tensors, version, persistent=True), may_alias=True)
            result = fresh.generate(question, version)
            policy = load_reference(reference, weights[which])
            fresh.assert_logprobs(policy, question, result, when=f"after refit {version} ")
            for name, value in tensors.items():
                np.testing.assert_array_equal(bytes_of(value), bytes_of(weights[which][name]), err_msg=name)

    def test_results_are_not_overwritten_by_later_calls(
        self, generator: GeneratorUnderTest, weights: WeightSets, question: Question
    ) -> None:
        """Arrays that were handed out keep their values."""
        held = generator.generate(question)
        arrays: tuple[AnyArray, ...] = (held.tokens, held.offsets, held.logprobs, held.weight_versions, held.finish_reasons)
        before = [array.copy() for array in arrays]
        generator.refit(weights[1], 1)
        generator.generate(question.ungrouped(range(len(question.seeds))), 1)
        generator.generate(question, 1)
        for array, copy in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, copy)

    def test_resident_state_is_accepted_and_measured(
        self, generator: GeneratorUnderTest, weights: WeightSets, question: Question
    ) -> None:
        """Every generator accepts it, whatever it declares, and then holds the weights at the least."""
        found = generator.move("device", "device")
        least = num_bytes(weights[0])
        assert found >= least, f"device_bytes: found {found}; expected at least {least}, the size of the weights"
        generator.generate(question)

    def test_moving_to_the_host_and_back_changes_nothing(
        self, generator: GeneratorUnderTest, policy: ReferencePolicy, weights: WeightSets, question: Question, device: Device
    ) -> None:
        """The weights come back, and may be refitted while the cache is away. What is said to be left on a device shrinks."""
        generator.require(capabilities.RESIDENCY)
        before = generator.generate(question)
        resident, moved = generator.move("device", "device"), generator.move("host", "host")
        # What is left may be a workspace that is larger than this small model: then what has gone counts.
        gone, least = resident - moved, num_bytes(weights[0])
        assert device == "cpu" or moved < resident / 2 or gone >= least, (
            f"on the host it still holds {moved} of {resident} bytes; expected half of them, or {least} fewer: the weights"
        )
        generator.move("device", "device")
        after = generator.generate(question)
        generator.assert_logprobs(policy, question, after)
        if capabilities.PER_SAMPLE_SEEDS in generator.provider.capabilities:
            assert_same_samples(after, before, range(len(question.seeds)), generator.tolerance)

    def test_refit_while_the_cache_is_away(
        self, generator: GeneratorUnderTest, reference: Reference, weights: WeightSets, question: Question
    ) -> None:
        """A trainer and a generator that take turns on a device do this in every step."""
        generator.require(capabilities.RESIDENCY)
        generator.generate(question)
        generator.move("host", "host")
        generator.wake_and_refit(weights[1], 1)
        generator.assert_logprobs(load_reference(reference, weights[1]), question, generator.generate(question, 1))

    def test_saved_state_holds_no_weights(
        self,
        generator: GeneratorUnderTest,
        open_generator: OpenGenerator,
        weights: WeightSets,
        question: Question,
        tmp_path: Path,
    ) -> None:
        """After loading, a fresh generator waits for a refit."""
        generator.handle.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
        fresh = open_generator()
        assert fresh.handle.load_state(LoadStateRequest(directory=tmp_path)).weight_version == -1
        with pytest.raises(RlcoreError):
            fresh.generate(question, 0)
        fresh.refit(weights[0], 0)
        fresh.generate(question, 0)
