"""The trainer's half of the conformance kit."""

from rlcore_conformance.trainers.trainer_adapters import TrainerAdapters
from rlcore_conformance.trainers.trainer_adapters_together import TrainerAdaptersTogether
from rlcore_conformance.trainers.trainer_gradient_norms import TrainerGradientNorms
from rlcore_conformance.trainers.trainer_images import TrainerImages
from rlcore_conformance.trainers.trainer_lifecycle import TrainerLifecycle
from rlcore_conformance.trainers.trainer_lora import TrainerLora
from rlcore_conformance.trainers.trainer_numerics import TrainerNumerics
from rlcore_conformance.trainers.trainer_optimizer import TrainerOptimizer
from rlcore_conformance.trainers.trainer_optimizer_kinds import TrainerOptimizerKinds
from rlcore_conformance.trainers.trainer_ranks import TrainerRanks
from rlcore_conformance.trainers.trainer_routing import TrainerRouting
from rlcore_conformance.trainers.trainer_sampling_mask import TrainerSamplingMask
from rlcore_conformance.trainers.trainer_split_step import TrainerSplitStep
from rlcore_conformance.trainers.trainer_values import TrainerValues
from rlcore_conformance.trainers.trainer_weights import TrainerWeights


class TrainerConformance(
    TrainerNumerics,
    TrainerOptimizer,
    TrainerOptimizerKinds,
    TrainerSplitStep,
    TrainerGradientNorms,
    TrainerWeights,
    TrainerLifecycle,
    TrainerRouting,
    TrainerSamplingMask,
    TrainerImages,
    TrainerLora,
    TrainerAdapters,
    TrainerAdaptersTogether,
    TrainerValues,
    TrainerRanks,
):
    """The checks that every trainer has to pass::

        class TestMine(TrainerConformance):
            @pytest.fixture
            def provider(self): return PROVIDER

    One that declares several ranks is launched on two, in processes of their own, on one machine.

    Fixtures to override where the default does not fit: `config` (the provider's defaults), `rank_config` (the same), `device`
    ("cpu"), `dtype` (float32, or else the first that the provider declares), `model` (a tiny Qwen3), `optimizer` (AdamW with a
    learning rate of 1e-3, which makes updates well visible), `tolerance` (in nats, by the dtype), `loss_path` (the probe loss
    in torch), `lora` (adapters of rank 3), `narrow_dtype` (one that it declares), `reference` (`transformers` on the CPU),
    `routed_model` (a tiny Qwen3-MoE) and `routed_reference`, `value_model` (a tiny Qwen3 with a head of values),
    `value_reference`, `value_loss_path`, `image_model` (a tiny Qwen3-VL), `image_reference` and `wide_model` (a tiny Qwen3 with
    matrices of 4096 elements).
    """
