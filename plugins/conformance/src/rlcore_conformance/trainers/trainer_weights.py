"""Checks of the weights that a trainer exports, and of the results that it hands out."""

import numpy as np
import pytest

from rlcore.spi import (
    ContractError,
    DtypeName,
    NamedTensor,
    TokenBatch,
    WeightExport,
    capabilities,
    tensor_digest,
)
from rlcore_conformance.references.reference import Reference, reference_logprobs
from rlcore_conformance.references.tensors import bytes_of, values_of
from rlcore_conformance.trainers.batches import make_batch
from rlcore_conformance.trainers.trainer_fixtures import TrainerFixtures, TrainerUnderTest, export_request


class TrainerWeights(TrainerFixtures):
    """An export is the policy's weights now, whole, under the right names."""

    @pytest.mark.parametrize("max_bucket_bytes", [1, 1 << 12, 1 << 30])
    def test_export_brings_what_it_announces(self, trainer: TrainerUnderTest, max_bucket_bytes: int) -> None:
        """Names, order, shapes, dtype, digests and bucket sizes; values do not depend on the buckets."""
        expected = trainer.weights()
        export = trainer.handle.export_weights(export_request(0, max_bucket_bytes=max_bucket_bytes))
        assert export.weight_version == 0
        names = []
        for bucket in export.buckets:
            sizes = [len(bytes_of(named.tensor)) for named in bucket.tensors]
            assert sum(sizes) <= max_bucket_bytes or len(sizes) == 1, f"a bucket holds {sum(sizes)} bytes"
            for named in bucket.tensors:
                assert_digest(named)
                np.testing.assert_array_equal(values_of(named.tensor), expected[named.name])
                names.append(named.name)
        assert names == [spec.name for spec in export.specs]

    def test_export_in_a_narrow_dtype_is_the_rounded_weights(self, trainer: TrainerUnderTest, narrow_dtype: DtypeName) -> None:
        """The names stay, and every value is within the dtype's precision."""
        expected = trainer.weights()
        export = trainer.handle.export_weights(export_request(0, dtype=narrow_dtype))
        assert {spec.dtype for spec in export.specs} == {narrow_dtype}
        held = [named for bucket in export.buckets for named in bucket.tensors]
        for named in held:
            assert_digest(named)
            np.testing.assert_allclose(values_of(named.tensor), expected[named.name], rtol=2**-8, atol=1e-6)
        assert {named.name for named in held} == expected.keys()

    def test_export_computes_what_the_trainer_computes(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """After every update an independent model with the exported weights has the trainer's log-probabilities."""
        for version in range(3):
            expected, _ = reference_logprobs(trainer.policy(version), batch, 1.0)
            trainer.assert_near(trainer.logprobs((batch,), version)[0], expected)
            trainer.step((batch,), version)

    def test_export_changes_with_the_weights(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Values and digests after updates are not those before, and the log-probabilities moved along."""
        before, digests = trainer.weights(0), digests_of(trainer.handle.export_weights(export_request(0)))
        (logprobs,) = trainer.logprobs((batch,), 0)
        version = 0
        while version < 4 and trainer.step((batch,), version).learning_rate == 0.0:
            version += 1
        version += 1
        after = trainer.weights(version)
        assert any((after[name] != before[name]).any() for name in before), "the export is that of before the update"
        assert digests_of(trainer.handle.export_weights(export_request(version))) != digests
        assert (trainer.logprobs((batch,), version)[0] != logprobs).any(), (
            "the log-probabilities are those of before the update"
        )

    def test_persistent_export_is_the_trainers_own_storage(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Tensors of a persistent export stay valid, and show each update."""
        export = trainer.handle.export_weights(export_request(0))
        held: list[NamedTensor] = [named for bucket in export.buckets for named in bucket.tensors]
        if not export.persistent:
            pytest.skip("float32 exports are not persistent")
        for named in held:
            assert_digest(named)
        for version in range(2):
            trainer.step((batch,), version)
        current = trainer.weights(2)
        for named in held:
            np.testing.assert_array_equal(values_of(named.tensor), current[named.name], err_msg=named.name)

    def test_results_are_not_overwritten_by_later_calls(
        self, trainer: TrainerUnderTest, reference: Reference, batch: TokenBatch
    ) -> None:
        """An array that was handed out keeps its values."""
        other = make_batch(reference.vocab_size, seed=5)
        (held,) = trainer.logprobs((batch,))
        copy = held.copy()
        first, second = trainer.logprobs((batch, other))
        np.testing.assert_array_equal(first, copy)
        assert (second != first).any()
        trainer.logprobs((other,))
        if capabilities.REFERENCE_POLICY in trainer.provider.capabilities:
            trainer.logprobs((other,), model="reference")
        trainer.step((other,))
        trainer.logprobs((batch,), 1)
        np.testing.assert_array_equal(held, copy)

    def test_fresh_trainer_holds_version_0(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """Requests for any other are refused."""
        with pytest.raises(ContractError):
            trainer.logprobs((batch,), 3)
        with pytest.raises(ContractError):
            trainer.handle.export_weights(export_request(3))
        with pytest.raises(ContractError):
            trainer.step((batch,), 3)
        assert trainer.step((batch,), 0).weight_version == 1

    def test_reference_stays_while_the_policy_trains(self, trainer: TrainerUnderTest, batch: TokenBatch) -> None:
        """It is the same before and after updates."""
        trainer.require(capabilities.REFERENCE_POLICY)
        (initial,) = trainer.logprobs((batch,), 0, model="reference")
        for version in range(3):
            trainer.step((batch,), version)
            np.testing.assert_array_equal(trainer.logprobs((batch,), version + 1, model="reference")[0], initial)
        assert (trainer.logprobs((batch,), 3)[0] != initial).any(), "the policy did not move"


def assert_digest(named: NamedTensor) -> None:
    """The digest is that of the tensor's bytes."""
    expected = tensor_digest(bytes_of(named.tensor))
    assert named.digest == expected, f"{named.name}: found digest {named.digest}; expected {expected}, that of its bytes"


def digests_of(export: WeightExport) -> dict[str, int]:
    """Return all digests of an export, by tensor."""
    return {named.name: named.digest for bucket in export.buckets for named in bucket.tensors}
