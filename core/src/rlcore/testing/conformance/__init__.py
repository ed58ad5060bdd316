"""The conformance kit: what every trainer, generator, algorithm, environment and sink has to pass.

A provider's tests are one class and one fixture; everything else has a default and can be overridden by a fixture of the
same name (see `TrainerConformance` and its like). A declared capability must pass its checks; those of an
undeclared one are skipped.
"""

import pytest

_CHECKS = (
    "algorithm_batches",
    "algorithm_losses",
    "environment",
    "environment_fixtures",
    "generator_distribution",
    "generator_fixtures",
    "generator_routing",
    "generator_sampling",
    "generator_streaming",
    "generator_weights",
    "huggingface_reference",
    "sink",
    "trainer_fixtures",
    "trainer_lifecycle",
    "trainer_numerics",
    "trainer_optimizer",
    "trainer_ranks",
    "trainer_routing",
    "trainer_weights",
)
# So that a failed assert shows its values, as in a test file.
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _CHECKS))
