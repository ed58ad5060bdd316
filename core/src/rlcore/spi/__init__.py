"""The service-provider interface: all that a plugin imports from rlcore, besides `rlcore_torchkit`.

Every name of the table is public, and imported where it is first asked for: listing plugins needs few of them, and no numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlcore.spi import capabilities as capabilities

_NAMES = {
    "algorithm": (
        "Algorithm AlgorithmNeeds MeasuringAlgorithm RolloutBatch StatefulAlgorithm TrainingBatch TurnRewards "
        "ValueMeasuringAlgorithm"
    ),
    "batch": (
        "ADVANTAGES EPISODE_IDS GENERATION_LOGPROBS GROUP_IDS MARGINS PREVIOUS_LOGPROBS REFERENCE_LOGPROBS "
        "ROUTED_EXPERTS VALUES WEIGHT_VERSIONS GlobalCounts PackedTokens RaggedTokens TokenBatch"
    ),
    "channels": (
        "CHANNEL_GROUP ChannelOptions ChannelProvider ChannelReceiver ChannelSender ReceivedBucket ReceiverRank find_channel "
        "installed_channels"
    ),
    "cluster": "ClusterConfig",
    "command": "COMMAND_GROUP CommandSpec",
    "context": "AlgorithmContext CheckContext EnvironmentContext GeneratorContext ModelSpec RankInfo TrainerContext",
    "data_source": ("DATASET_GROUP DataSourceProvider DataSourceRequest installed_data_sources source_of_suffix"),
    "derivatives": "LossGradients loss_gradients total_loss",
    "environment": (
        "AgentEnvironment Environment EpisodeResult Message Observation ResetResult Row SessionEndpoint StepResult Turn"
    ),
    "errors": (
        "BoundError CheckpointError ConfigError ContractError DataError InterruptedRun ModelError NonFiniteError Note "
        "PluginError Problem RefitError RewardError RlcoreError StorageError WorkerError"
    ),
    "execution": (
        "BackendGroup Backends EngineLimitError ExecutionProgress GeneratorGroup LogprobsColumn Minibatch OpenBackends "
        "RefitCommand Refitted ResponseFeed Responses TextDecoder TrainerGroup WeightRoute"
    ),
    "generator": (
        "DraftCounts FinishReason GenerateRequest GenerateResult GeneratorSpec RefitRequest RefitResult RoutedExperts "
        "SampleFeed SamplingParams StreamRequest StreamResult"
    ),
    "hooks": "hookimpl",
    "images": "Images",
    "importing": "IMPORTER_GROUP ImportedRecipe Unmapped",
    "lifecycle": (
        "CloseRequest LoadStateRequest LoadStateResult SaveStateRequest SaveStateResult SetResidencyRequest SetResidencyResult"
    ),
    "lora": "LoraSpec",
    "loss": "MISMATCH_METRICS LossInputs LossOutput LossSpec",
    "observer": "CHECKPOINT_EVALUATOR_GROUP ObserverContext",
    "optimizer": "OptimizerSpec ScheduleSpec",
    "planning": "PLANNER_GROUP DeviceSpec PlanContext PlanOption",
    "provider": (
        "ARCHITECTURE_GROUP ENTRY_POINT_GROUPS GLOBAL_OBSERVER_GROUP OBSERVER_GROUP ROLES SESSION_SERVER_GROUP Provider Role"
    ),
    "rows": "LazyRows",
    "sampling_mask": "SamplingMask",
    "sessions": ("ChatTokenizer Sample SampleRequest Sampler Segment Session SessionContext SessionServer"),
    "shards": "ShardSlice Delta ShardExport ShardRoute",
    "sink": "CHART_GROUP EvaluationSink LoggedSample SampleSink Sink SinkContext",
    "text": "RENDERER_GROUP TOKENIZER_GROUP TextProvider Tokenizer",
    "tools": "ParseToolCalls Tool ToolCall ToolParser",
    "trainer": (
        "ExportWeightsRequest LogprobsRequest LogprobsResult TrainerLayout TrainerSpec TrainStepRequest TrainStepResult "
        "ValuesRequest ValuesResult"
    ),
    "version": "SPI_VERSION",
    "weights": "DtypeName Head NamedTensor TensorSpec WeightBucket WeightExport tensor_digest",
}
"""The names of each module."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = ["capabilities", *_MODULES]

if TYPE_CHECKING:
    from rlcore.spi.algorithm import Algorithm as Algorithm
    from rlcore.spi.algorithm import AlgorithmNeeds as AlgorithmNeeds
    from rlcore.spi.algorithm import MeasuringAlgorithm as MeasuringAlgorithm
    from rlcore.spi.algorithm import RolloutBatch as RolloutBatch
    from rlcore.spi.algorithm import StatefulAlgorithm as StatefulAlgorithm
    from rlcore.spi.algorithm import TrainingBatch as TrainingBatch
    from rlcore.spi.algorithm import TurnRewards as TurnRewards
    from rlcore.spi.algorithm import ValueMeasuringAlgorithm as ValueMeasuringAlgorithm
    from rlcore.spi.batch import ADVANTAGES as ADVANTAGES
    from rlcore.spi.batch import EPISODE_IDS as EPISODE_IDS
    from rlcore.spi.batch import GENERATION_LOGPROBS as GENERATION_LOGPROBS
    from rlcore.spi.batch import GROUP_IDS as GROUP_IDS
    from rlcore.spi.batch import MARGINS as MARGINS
    from rlcore.spi.batch import PREVIOUS_LOGPROBS as PREVIOUS_LOGPROBS
    from rlcore.spi.batch import REFERENCE_LOGPROBS as REFERENCE_LOGPROBS
    from rlcore.spi.batch import ROUTED_EXPERTS as ROUTED_EXPERTS
    from rlcore.spi.batch import VALUES as VALUES
    from rlcore.spi.batch import WEIGHT_VERSIONS as WEIGHT_VERSIONS
    from rlcore.spi.batch import GlobalCounts as GlobalCounts
    from rlcore.spi.batch import PackedTokens as PackedTokens
    from rlcore.spi.batch import RaggedTokens as RaggedTokens
    from rlcore.spi.batch import TokenBatch as TokenBatch
    from rlcore.spi.channels import CHANNEL_GROUP as CHANNEL_GROUP
    from rlcore.spi.channels import ChannelOptions as ChannelOptions
    from rlcore.spi.channels import ChannelProvider as ChannelProvider
    from rlcore.spi.channels import ChannelReceiver as ChannelReceiver
    from rlcore.spi.channels import ChannelSender as ChannelSender
    from rlcore.spi.channels import ReceivedBucket as ReceivedBucket
    from rlcore.spi.channels import ReceiverRank as ReceiverRank
    from rlcore.spi.channels import find_channel as find_channel
    from rlcore.spi.channels import installed_channels as installed_channels
    from rlcore.spi.cluster import ClusterConfig as ClusterConfig
    from rlcore.spi.command import COMMAND_GROUP as COMMAND_GROUP
    from rlcore.spi.command import CommandSpec as CommandSpec
    from rlcore.spi.context import AlgorithmContext as AlgorithmContext
    from rlcore.spi.context import CheckContext as CheckContext
    from rlcore.spi.context import EnvironmentContext as EnvironmentContext
    from rlcore.spi.context import GeneratorContext as GeneratorContext
    from rlcore.spi.context import ModelSpec as ModelSpec
    from rlcore.spi.context import RankInfo as RankInfo
    from rlcore.spi.context import TrainerContext as TrainerContext
    from rlcore.spi.data_source import DATASET_GROUP as DATASET_GROUP
    from rlcore.spi.data_source import DataSourceProvider as DataSourceProvider
    from rlcore.spi.data_source import DataSourceRequest as DataSourceRequest
    from rlcore.spi.data_source import installed_data_sources as installed_data_sources
    from rlcore.spi.data_source import source_of_suffix as source_of_suffix
    from rlcore.spi.derivatives import LossGradients as LossGradients
    from rlcore.spi.derivatives import loss_gradients as loss_gradients
    from rlcore.spi.derivatives import total_loss as total_loss
    from rlcore.spi.environment import AgentEnvironment as AgentEnvironment
    from rlcore.spi.environment import Environment as Environment
    from rlcore.spi.environment import EpisodeResult as EpisodeResult
    from rlcore.spi.environment import Message as Message
    from rlcore.spi.environment import Observation as Observation
    from rlcore.spi.environment import ResetResult as ResetResult
    from rlcore.spi.environment import Row as Row
    from rlcore.spi.environment import SessionEndpoint as SessionEndpoint
    from rlcore.spi.environment import StepResult as StepResult
    from rlcore.spi.environment import Turn as Turn
    from rlcore.spi.errors import BoundError as BoundError
    from rlcore.spi.errors import CheckpointError as CheckpointError
    from rlcore.spi.errors import ConfigError as ConfigError
    from rlcore.spi.errors import ContractError as ContractError
    from rlcore.spi.errors import DataError as DataError
    from rlcore.spi.errors import InterruptedRun as InterruptedRun
    from rlcore.spi.errors import ModelError as ModelError
    from rlcore.spi.errors import NonFiniteError as NonFiniteError
    from rlcore.spi.errors import Note as Note
    from rlcore.spi.errors import PluginError as PluginError
    from rlcore.spi.errors import Problem as Problem
    from rlcore.spi.errors import RefitError as RefitError
    from rlcore.spi.errors import RewardError as RewardError
    from rlcore.spi.errors import RlcoreError as RlcoreError
    from rlcore.spi.errors import StorageError as StorageError
    from rlcore.spi.errors import WorkerError as WorkerError
    from rlcore.spi.execution import BackendGroup as BackendGroup
    from rlcore.spi.execution import Backends as Backends
    from rlcore.spi.execution import EngineLimitError as EngineLimitError
    from rlcore.spi.execution import ExecutionProgress as ExecutionProgress
    from rlcore.spi.execution import GeneratorGroup as GeneratorGroup
    from rlcore.spi.execution import LogprobsColumn as LogprobsColumn
    from rlcore.spi.execution import Minibatch as Minibatch
    from rlcore.spi.execution import OpenBackends as OpenBackends
    from rlcore.spi.execution import RefitCommand as RefitCommand
    from rlcore.spi.execution import Refitted as Refitted
    from rlcore.spi.execution import ResponseFeed as ResponseFeed
    from rlcore.spi.execution import Responses as Responses
    from rlcore.spi.execution import TextDecoder as TextDecoder
    from rlcore.spi.execution import TrainerGroup as TrainerGroup
    from rlcore.spi.execution import WeightRoute as WeightRoute
    from rlcore.spi.generator import DraftCounts as DraftCounts
    from rlcore.spi.generator import FinishReason as FinishReason
    from rlcore.spi.generator import GenerateRequest as GenerateRequest
    from rlcore.spi.generator import GenerateResult as GenerateResult
    from rlcore.spi.generator import GeneratorSpec as GeneratorSpec
    from rlcore.spi.generator import RefitRequest as RefitRequest
    from rlcore.spi.generator import RefitResult as RefitResult
    from rlcore.spi.generator import RoutedExperts as RoutedExperts
    from rlcore.spi.generator import SampleFeed as SampleFeed
    from rlcore.spi.generator import SamplingParams as SamplingParams
    from rlcore.spi.generator import StreamRequest as StreamRequest
    from rlcore.spi.generator import StreamResult as StreamResult
    from rlcore.spi.hooks import hookimpl as hookimpl
    from rlcore.spi.images import Images as Images
    from rlcore.spi.importing import IMPORTER_GROUP as IMPORTER_GROUP
    from rlcore.spi.importing import ImportedRecipe as ImportedRecipe
    from rlcore.spi.importing import Unmapped as Unmapped
    from rlcore.spi.lifecycle import CloseRequest as CloseRequest
    from rlcore.spi.lifecycle import LoadStateRequest as LoadStateRequest
    from rlcore.spi.lifecycle import LoadStateResult as LoadStateResult
    from rlcore.spi.lifecycle import SaveStateRequest as SaveStateRequest
    from rlcore.spi.lifecycle import SaveStateResult as SaveStateResult
    from rlcore.spi.lifecycle import SetResidencyRequest as SetResidencyRequest
    from rlcore.spi.lifecycle import SetResidencyResult as SetResidencyResult
    from rlcore.spi.lora import LoraSpec as LoraSpec
    from rlcore.spi.loss import MISMATCH_METRICS as MISMATCH_METRICS
    from rlcore.spi.loss import LossInputs as LossInputs
    from rlcore.spi.loss import LossOutput as LossOutput
    from rlcore.spi.loss import LossSpec as LossSpec
    from rlcore.spi.observer import CHECKPOINT_EVALUATOR_GROUP as CHECKPOINT_EVALUATOR_GROUP
    from rlcore.spi.observer import ObserverContext as ObserverContext
    from rlcore.spi.optimizer import OptimizerSpec as OptimizerSpec
    from rlcore.spi.optimizer import ScheduleSpec as ScheduleSpec
    from rlcore.spi.planning import PLANNER_GROUP as PLANNER_GROUP
    from rlcore.spi.planning import DeviceSpec as DeviceSpec
    from rlcore.spi.planning import PlanContext as PlanContext
    from rlcore.spi.planning import PlanOption as PlanOption
    from rlcore.spi.provider import ARCHITECTURE_GROUP as ARCHITECTURE_GROUP
    from rlcore.spi.provider import ENTRY_POINT_GROUPS as ENTRY_POINT_GROUPS
    from rlcore.spi.provider import GLOBAL_OBSERVER_GROUP as GLOBAL_OBSERVER_GROUP
    from rlcore.spi.provider import OBSERVER_GROUP as OBSERVER_GROUP
    from rlcore.spi.provider import ROLES as ROLES
    from rlcore.spi.provider import SESSION_SERVER_GROUP as SESSION_SERVER_GROUP
    from rlcore.spi.provider import Provider as Provider
    from rlcore.spi.provider import Role as Role
    from rlcore.spi.rows import LazyRows as LazyRows
    from rlcore.spi.sampling_mask import SamplingMask as SamplingMask
    from rlcore.spi.sessions import ChatTokenizer as ChatTokenizer
    from rlcore.spi.sessions import Sample as Sample
    from rlcore.spi.sessions import Sampler as Sampler
    from rlcore.spi.sessions import SampleRequest as SampleRequest
    from rlcore.spi.sessions import Segment as Segment
    from rlcore.spi.sessions import Session as Session
    from rlcore.spi.sessions import SessionContext as SessionContext
    from rlcore.spi.sessions import SessionServer as SessionServer
    from rlcore.spi.shards import Delta as Delta
    from rlcore.spi.shards import ShardExport as ShardExport
    from rlcore.spi.shards import ShardRoute as ShardRoute
    from rlcore.spi.shards import ShardSlice as ShardSlice
    from rlcore.spi.sink import CHART_GROUP as CHART_GROUP
    from rlcore.spi.sink import EvaluationSink as EvaluationSink
    from rlcore.spi.sink import LoggedSample as LoggedSample
    from rlcore.spi.sink import SampleSink as SampleSink
    from rlcore.spi.sink import Sink as Sink
    from rlcore.spi.sink import SinkContext as SinkContext
    from rlcore.spi.text import RENDERER_GROUP as RENDERER_GROUP
    from rlcore.spi.text import TOKENIZER_GROUP as TOKENIZER_GROUP
    from rlcore.spi.text import TextProvider as TextProvider
    from rlcore.spi.text import Tokenizer as Tokenizer
    from rlcore.spi.tools import ParseToolCalls as ParseToolCalls
    from rlcore.spi.tools import Tool as Tool
    from rlcore.spi.tools import ToolCall as ToolCall
    from rlcore.spi.tools import ToolParser as ToolParser
    from rlcore.spi.trainer import ExportWeightsRequest as ExportWeightsRequest
    from rlcore.spi.trainer import LogprobsRequest as LogprobsRequest
    from rlcore.spi.trainer import LogprobsResult as LogprobsResult
    from rlcore.spi.trainer import TrainerLayout as TrainerLayout
    from rlcore.spi.trainer import TrainerSpec as TrainerSpec
    from rlcore.spi.trainer import TrainStepRequest as TrainStepRequest
    from rlcore.spi.trainer import TrainStepResult as TrainStepResult
    from rlcore.spi.trainer import ValuesRequest as ValuesRequest
    from rlcore.spi.trainer import ValuesResult as ValuesResult
    from rlcore.spi.version import SPI_VERSION as SPI_VERSION
    from rlcore.spi.weights import DtypeName as DtypeName
    from rlcore.spi.weights import Head as Head
    from rlcore.spi.weights import NamedTensor as NamedTensor
    from rlcore.spi.weights import TensorSpec as TensorSpec
    from rlcore.spi.weights import WeightBucket as WeightBucket
    from rlcore.spi.weights import WeightExport as WeightExport
    from rlcore.spi.weights import tensor_digest as tensor_digest


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
