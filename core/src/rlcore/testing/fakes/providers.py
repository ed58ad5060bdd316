"""The fakes' providers, each of the name "fake", and a registry that holds them alone."""

from rlcore.registry.discovery import Registry
from rlcore.spi import SPI_VERSION, ClusterConfig, Provider, capabilities
from rlcore.testing.fakes.algorithm import FakeAlgorithmConfig
from rlcore.testing.fakes.environment import FakeEnvironmentConfig
from rlcore.testing.fakes.generator import FakeGeneratorConfig
from rlcore.testing.fakes.trainer import FakeTrainerConfig

DTYPES = frozenset({"float32", "float16"})
"""The dtypes that numpy has."""
FAKE_TRAINER = Provider(
    name="fake",
    dtypes=DTYPES,
    spi=SPI_VERSION,
    config=FakeTrainerConfig,
    backend="rlcore.testing.fakes.trainer:FakeTrainer",
    reads_model=False,
    capabilities={
        capabilities.REFERENCE_POLICY,
        capabilities.REFERENCE_MODEL,
        capabilities.REFERENCE_ALONE,
        capabilities.ENTROPY,
        capabilities.METRIC_BOUNDS,
        capabilities.PREVIOUS_LOGPROBS,
        capabilities.STEP_LOGPROBS,
        capabilities.GRADIENT_NORMS,
        capabilities.SCHEDULE_STEP,
        capabilities.SPLIT_STEP,
        capabilities.SAMPLING_MASK_REPLAY,
        capabilities.VALUE_HEAD,
        capabilities.RESIDENCY,
        capabilities.IN_PROCESS,
    },
)
FAKE_GENERATOR = Provider(
    name="fake",
    dtypes=DTYPES,
    spi=SPI_VERSION,
    config=FakeGeneratorConfig,
    backend="rlcore.testing.fakes.generator:FakeGenerator",
    reads_model=False,
    capabilities={
        *capabilities.SAMPLING,
        capabilities.STREAMING,
        capabilities.CONTINUOUS,
        capabilities.IN_FLIGHT_REFIT,
        capabilities.SAMPLING_MASK,
        capabilities.OWN_WEIGHTS,
        capabilities.ADAPTER_REFIT,
        capabilities.MANY_ADAPTERS,
        capabilities.RESIDENCY,
        capabilities.DISCARD_WEIGHTS,
        capabilities.IN_PROCESS,
    },
)
FAKE_ALGORITHM = Provider(
    name="fake", spi=SPI_VERSION, config=FakeAlgorithmConfig, backend="rlcore.testing.fakes.algorithm:FakeAlgorithm"
)
FAKE_ENVIRONMENT = Provider(
    name="fake",
    spi=SPI_VERSION,
    config=FakeEnvironmentConfig,
    backend="rlcore.testing.fakes.environment:FakeEnvironment",
    capabilities={capabilities.CHEAP_RESET},
)
FAKE_EXECUTION = Provider(
    name="fake",
    spi=SPI_VERSION,
    config=ClusterConfig,
    backend="rlcore.run.execution.in_process:in_process",
    capabilities={capabilities.MULTI_RANK},
)
"""An execution for plans of several ranks. It runs one rank alone."""


def fake_registry() -> Registry:
    """The fakes, and nothing that is installed."""
    return Registry.from_providers(
        {
            "trainer": [FAKE_TRAINER],
            "generator": [FAKE_GENERATOR],
            "algorithm": [FAKE_ALGORITHM],
            "environment": [FAKE_ENVIRONMENT],
            "execution": [FAKE_EXECUTION],
        }
    )
