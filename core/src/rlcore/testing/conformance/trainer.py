"""The trainer's half of the conformance kit."""

from rlcore.testing.conformance.trainer_lifecycle import TrainerLifecycle
from rlcore.testing.conformance.trainer_numerics import TrainerNumerics
from rlcore.testing.conformance.trainer_weights import TrainerWeights


class TrainerConformance(TrainerNumerics, TrainerWeights, TrainerLifecycle):
    """What every trainer has to pass::

        class TestMine(TrainerConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    Fixtures to override where the default does not fit: `config` (the provider's defaults; a learning rate of 1e-3 or so
    makes updates well visible), `device` ("cpu"), `model` (a tiny Qwen3 in float32), `tolerance` (1e-4 nats), `loss_path`
    (the probe loss in torch), `narrow_dtype` ("bfloat16") and `reference` (`transformers` on the CPU).
    """
