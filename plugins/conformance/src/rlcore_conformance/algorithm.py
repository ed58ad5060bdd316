"""The algorithm's part of the conformance kit."""

from rlcore_conformance.algorithms.algorithm_batches import AlgorithmBatches
from rlcore_conformance.algorithms.algorithm_losses import AlgorithmLosses


class AlgorithmConformance(AlgorithmBatches, AlgorithmLosses):
    """The checks that every algorithm has to pass, whatever it learns from::

        class TestMine(AlgorithmConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `config` (the provider's defaults), `algorithm_context` (four samples a
    prompt, two updates a step), `rollouts` (a few groups, demonstrations or preferences, as the algorithm needs them) and
    `evaluate_loss` (in torch).
    """
