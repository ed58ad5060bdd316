"""The service-provider interface: all that a plugin imports from rlcore, besides `rlcore_torchkit`.

Every name of the table is public, and imported where it is first asked for: listing plugins needs few of them, and no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcore.spi import capabilities as capabilities

NAMES = {
    "algorithm": (
        "Algorithm AlgorithmNeeds MeasuringAlgorithm PromptingAlgorithm RolloutBatch RowReadingAlgorithm StatefulAlgorithm "
        "TrainingBatch TurnRewards ValueMeasuringAlgorithm"
    ),
    "batch": (
        "ADVANTAGES EPISODE_IDS GENERATION_LOGPROBS GROUP_IDS MARGINS PREVIOUS_LOGPROBS REFERENCE_LOGPROBS "
        "ROUTED_EXPERTS VALUES WEIGHT_VERSIONS GlobalCounts Images PackedTokens RaggedTokens "
        "SamplingMask TokenBatch"
    ),
    "channels": (
        "CHANNEL_GROUP ChannelOptions ChannelProvider ChannelReceiver ChannelSender ReceivedBucket ReceiverRank find_channel "
        "installed_channels"
    ),
    "cluster": "ClusterConfig",
    "collector": "COLLECTOR_GROUP RUN_KINDS CollectorProvider RunKind",
    "command": "COMMAND_GROUP CommandSpec",
    "context": (
        "AlgorithmContext CheckContext EnvironmentContext GeneratorContext LoraSpec ModelSpec MuonSpec OptimizerGroup "
        "OptimizerSpec RankInfo ScheduleSpec TrainerContext"
    ),
    "data_source": ("DATASET_GROUP DataSourceProvider DataSourceRequest installed_data_sources source_of_suffix"),
    "environment": (
        "AgentEnvironment Environment EpisodeFailure EpisodeResult LazyRows Message Observation ResetResult Row "
        "SessionEndpoint StepResult Tool ToolCall ToolParser ParseToolCalls Turn"
    ),
    "errors": (
        "BoundError CheckpointError ConfigError ContractError DataError FailureKind InterruptedRun ModelError NonFiniteError "
        "Note PluginError Problem RefitError RewardError RlcoreError StorageError WorkerError fails_as failure_kind"
    ),
    "execution": (
        "BackendGroup Backends EngineLimitError ExecutionProgress GeneratorGroup LogprobsColumn Minibatch OpenBackends "
        "RefitCommand Refitted ResponseFeed Responses TextDecoder TrainerGroup WeightRoute"
    ),
    "generator": (
        "DraftCounts FinishReason GenerateRequest GenerateResult GeneratorSpec RefitRequest RefitResult RoutedExperts "
        "SampleFeed SamplingParams StreamRequest StreamResult TokenReader"
    ),
    "lifecycle": (
        "CloseRequest LoadStateRequest LoadStateResult SaveStateRequest SaveStateResult SetResidencyRequest SetResidencyResult "
        "hookimpl"
    ),
    "loss": "MISMATCH_METRICS LossInputs LossOutput LossSpec",
    "observer": "EvaluatedRun LOOP_OBSERVER_GROUP LoopObserverProvider ObserverContext",
    "planning": "PLANNER_GROUP DeviceSpec PlanContext PlanOption",
    "provider": (
        "API_GROUP ARCHITECTURE_GROUP DISPLAY_GROUP ENTRY_POINT_GROUPS GLOBAL_OBSERVER_GROUP MODEL_CHECK_GROUP "
        "OBSERVER_GROUP REFERENCE_CACHE_GROUP ROLES SESSION_SERVER_GROUP Provider Role"
    ),
    "sink": "CHART_GROUP EvaluationSink LoggedSample SampleSink Sink SinkContext",
    "text": "TextProvider",
    "tokenizer": "ChatTokenizer Tokenizer",
    "trainer": (
        "ExportWeightsRequest ForwardBackwardRequest ForwardBackwardResult ForwardBackwardTogetherRequest "
        "ForwardBackwardTogetherResult LogprobsRequest LogprobsResult OptimStepRequest OptimStepResult TrainerLayout "
        "TrainerSpec TrainStepRequest TrainStepResult UseAdapterRequest UseAdapterResult ValuesRequest ValuesResult"
    ),
    "version": "SPI_VERSION",
    "weights": (
        "Delta DtypeName Head NamedTensor ShardExport ShardRoute ShardSlice TensorSpec WeightBucket WeightExport tensor_digest"
    ),
}
"""The public names of each module."""
_MODULES = {name: module for module, names in NAMES.items() for name in names.split()}
__all__ = ["capabilities", *_MODULES]

if TYPE_CHECKING:
    from rlcore.spi.algorithm import *
    from rlcore.spi.batch import *
    from rlcore.spi.channels import *
    from rlcore.spi.cluster import *
    from rlcore.spi.collector import *
    from rlcore.spi.command import *
    from rlcore.spi.context import *
    from rlcore.spi.data_source import *
    from rlcore.spi.environment import *
    from rlcore.spi.errors import *
    from rlcore.spi.execution import *
    from rlcore.spi.generator import *
    from rlcore.spi.lifecycle import *
    from rlcore.spi.loss import *
    from rlcore.spi.observer import *
    from rlcore.spi.planning import *
    from rlcore.spi.provider import *
    from rlcore.spi.sink import *
    from rlcore.spi.text import *
    from rlcore.spi.tokenizer import *
    from rlcore.spi.trainer import *
    from rlcore.spi.version import *
    from rlcore.spi.weights import *


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
