"""The recipe: every option of the core, its default and its meaning.

The sections of the model, of data, and those that choose plugins have modules of their own. Executions add keys to [cluster].
"""

import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from attrs import field, frozen

from rlcore.config.asynchrony import AsyncConfig
from rlcore.config.checkpoint_evaluation import CheckpointEvaluationConfig
from rlcore.config.data import DataConfig, NumRows
from rlcore.config.model import CriticConfig, ModelConfig, Offload, ReferenceConfig
from rlcore.config.plugin_choice import EACH_ONCE, NamedPluginChoice, ObserversConfig, PluginChoice, PluginsConfig, SinksConfig
from rlcore.schema.constraints import (
    KNOWN_HOME,
    Constraint,
    Count,
    Positive,
    Seconds,
    Share,
    Text,
    above,
    above_at_most,
    at_least,
    between,
)
from rlcore.schema.describe import NO_KEY, WORDS
from rlcore.spi import AlgorithmContext, ClusterConfig, DtypeName, LoraSpec, OptimizerSpec, ScheduleSpec

_FOLDER = Constraint(
    "that names one folder",
    lambda value: value.strip() not in ("", ".", "..") and not set(value) & set('/\\\0<>:"|?*\n'),
    "The folder that it is made in is run.directory.",
)
_MISMATCH = Constraint(
    "above 1",
    lambda value: value > 1,
    "It bounds the mean of exp(|difference|), which is 1 where generator and trainer agree exactly.",
)
_NO_GREEDY = "The loss needs the probabilities sampled from; greedy decoding has none. It is for evaluation.temperature."

_REPOSITORY = Constraint(
    'such as "user/name"',
    lambda value: re.fullmatch(r"[\w.-]+/[\w.-]+", value) is not None,
    "Name the user, or the organisation, too.",
)

FolderName: TypeAlias = Annotated[str, _FOLDER]
Repository: TypeAlias = Annotated[str, _REPOSITORY]
Mismatch: TypeAlias = Annotated[float, _MISMATCH]
TurnedOffBy0: TypeAlias = Annotated[int, at_least(0, "0 turns it off.")]
TopK: TypeAlias = Annotated[int, at_least(0, "0 samples from all tokens.")]
TopP: TypeAlias = Annotated[float, above_at_most(0, 1, "1.0 samples from all tokens.")]


@frozen(kw_only=True)
class RunConfig:
    """`[run]`: where results go, and what makes them repeatable."""

    directory: Annotated[Text, KNOWN_HOME] = "runs"
    """Folder under which the run directory is made; a leading ~ is the user's home."""
    name: FolderName = "run"
    """Name of the run directory inside it."""
    seed: Count = 0
    """Seed of everything random: data order, sampling, initialisation."""
    num_steps: Positive = 100
    """Steps of the loop; each generates (or reads) one batch and trains on it."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata={WORDS: {"gpu": "cuda"}})
    """Device of trainer and generator; "auto" takes CUDA where it is available. "gpu" is another word for "cuda"."""


@frozen(kw_only=True)
class RolloutConfig:
    """`[rollout]`: how samples are generated and scored during training."""

    samples_per_prompt: Positive = 8
    """Samples of one prompt, which form a group."""
    max_samples_per_prompt: Annotated[int, between(2, 2**20)] | None = None
    """A multiple of it: as long as the rewards of a group are all equal, it gets as many samples again, up to this number
    (the rounds of Reinforce-Ada, arXiv:2510.04996). None: all groups have as many."""
    max_prompt_tokens: Positive = 512
    """Longest prompt."""
    max_response_tokens: Positive = 512
    """Most tokens after the prompt; in several turns, over all of them, the environment's included."""
    temperature: Annotated[float, above(0, _NO_GREEDY)] = 1.0
    """Sampling temperature; the log-probabilities trained on are those at this temperature."""
    top_k: TopK = 0
    """Sample from the k most probable tokens; 0 is all."""
    top_p: TopP = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 1.0 is all."""
    accept_truncation_bias: bool = False
    """True: normalise the trainer's probabilities over all tokens, although `top_k` or `top_p` truncates the distribution of
    the samples. An algorithm that compares the two has biased ratios and importance weights, and the mismatch cannot be
    measured. False: the generator reports which tokens it kept, and the trainer normalises over these."""
    stop_strings: Annotated[tuple[str, ...], EACH_ONCE] = ()
    """Texts that end a response, besides the tokenizer's end-of-sequence token."""
    stop_token_ids: tuple[Count, ...] | None = None
    """Tokens that end a response; None is those of the tokenizer and of the model's generation_config.json, or of its
    config.json where there is none, and the special token that the chat template writes behind an answer."""
    max_turns: Positive = 1
    """Most turns of an episode."""
    history: Literal["segment", "refuse", "keep_sampled"] = "segment"
    """Handling of a chat of several turns whose template would change earlier tokens, as some remove earlier thoughts.
    "segment": begin another sequence of the episode, a segment, with the chat as the template now renders it. "refuse": an
    error. "keep_sampled", where no agent runs the episodes: keep all tokens as the policy saw them, and append only the
    template's text after the turn."""
    max_turn_tokens: Positive | None = None
    """Most tokens of one turn of the policy; None is whatever `max_response_tokens` leaves. An episode goes on after a
    turn that this cut off."""
    on_truncation: Literal["train", "mask"] = "train"
    """Train on samples that a limit of tokens or turns cut off, by the reward that they got, or mask them out of the training
    step. `truncated_fraction` counts them in either case."""
    tool_parser: Text = "auto"
    """How the policy writes calls of tools: "hermes" (Hermes, Qwen2.5, Qwen3), "llama3_json" (Llama 3.1 and 3.2), "openai"
    (gpt-oss), or a parser of the generator's, such as "qwen3_coder". "auto" takes the first that the chat template shows."""
    dynamic_sampling: bool | None = None
    """Replace a group whose rewards are all equal, masked samples aside, by the next prompt's (dynamic sampling,
    arXiv:2503.14476). Such a group teaches nothing. If the algorithm compares turns or parts of rewards, all of those are equal
    in it. None is true for algorithms that are meant for it, else false. True is refused without rewards."""
    max_refill_ratio: Annotated[float, above(0)] = 4.0
    """With it, the most groups that may be replaced from one step to the next, in relation to training.prompts_per_step times
    1 + async.max_staleness; beyond it the run ends."""
    reuse: Positive = 1
    """Steps that train on each batch of samples, one after another; at most async.max_staleness + 1. A step weighs the samples
    of earlier weights as [async] says."""
    replay_routing: bool = False
    """For mixture-of-experts models, have the generator report the experts of each token, and the trainer send it to the same
    ones."""
    environment_timeout_s: Seconds = 60.0
    """Most seconds for one call of the environment."""
    environment_concurrency: Positive | None = None
    """Most calls of the environment at once; None is as many as it can work on, at most 256."""
    episode_timeout_s: Seconds | None = None
    """Most seconds for an episode, from the first request for the step's samples, so waiting for other samples counts. A slower
    one is masked, and counted as `environment/timed_out` and `environment/failed`. None is no bound."""
    on_environment_error: Literal["error", "mask"] = "error"
    """The handling of an error of the environment. "error": end the run. "mask": mask the sample (`environment/failed`); in an
    evaluation it counts as unsolved (`eval/failed`). A failure that the environment returns is masked in either case."""
    max_failed_fraction: Share = 0.5
    """The largest share of failed samples; above it the run ends with the reason. It is a share of an evaluation's or a step's
    samples; if steps overlap, of all steps in progress. Failures of a replaced group count until its step is trained on."""

    @property
    def truncates(self) -> bool:
        """Return whether samples come from a part of the distribution."""
        return self.top_k > 0 or self.top_p < 1.0

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return self.max_prompt_tokens + self.max_response_tokens


@frozen(kw_only=True)
class TrainingConfig:
    """`[training]`: the batch of a step and how it is cut."""

    prompts_per_step: Positive = 32
    """Prompts (or demonstrations, or pairs of answers) of a step."""
    minibatches_per_step: Positive = 1
    """Optimizer steps that a step's batch is divided into, whole groups each."""
    epochs_per_step: Positive = 1
    """Passes over a step's rollouts, each in minibatches of its own (epochs). Ratios are to the start of the step."""
    max_tokens_per_microbatch: Positive = 8192
    """Most tokens in one forward and backward pass; a longer sequence gets one of its own, and so do the two of a pair of
    answers."""
    on_no_signal: Literal["skip", "error"] = "skip"
    """When nothing can be learned from a step (all rewards of every group equal): warn and make no update, or end. One of
    several updates of a step that has nothing to learn from is left out in either case."""
    warn_token_mult_prob_error: Mismatch = 1.05
    """When a step's mean exp(|generation - trainer log-probability|) rises above this, a note says so and the worst samples are
    written to `logprob_mismatch/`; inf never."""
    max_token_mult_prob_error: Mismatch = 2.0
    """Above this the update is refused, the worst samples are written, and the run ends: generator and trainer disagree; inf
    never."""

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps of a step."""
        return self.minibatches_per_step * self.epochs_per_step


@frozen(kw_only=True)
class RefitConfig:
    """`[refit]`: how weights get from the trainer to the generator."""

    channel: Text = "auto"
    """The name of a channel that `rlcore plugins` lists. "auto" takes the cheapest that trainer and generator both have where
    they run."""
    adapters: Literal["auto", "merged", "unmerged"] = "auto"
    """Weights that a refit sends with [lora]. "merged": the whole model's, with the adapters in them. "unmerged": only the
    adapters; the generator's first refit, and each after a sleep or restart, also sends the base weights. "auto" is "unmerged"
    where trainer and generator both can."""
    max_adapters: Positive = 1
    """Most adapters that the generator holds at once, for sessions and training servers. More than one need
    `adapters = "unmerged"`, and take memory for each."""
    max_bucket_mib: Positive = 256
    """Most MiB that travel at once."""
    delta: Literal["off", "device", "host"] = "off"
    """Send only the values that have changed since the refit before. Both sides then keep what that brought, on their "device"
    or their "host". With the channels "shards" and "directory"."""
    max_attempts: Positive = 2
    """How often a refit, or a generation whose worker died, is tried before the run ends; workers are restarted in between."""


@frozen(kw_only=True)
class OffloadConfig:
    """`[offload]`: trainer and generator that share a GPU take turns in its memory; nothing moves elsewhere."""

    generator_sleep_mode: bool = True
    """While the trainer works, the generator's weights and KV cache leave the device."""
    trainer: Offload = "none"
    """The parts of the trainer that leave the device while the generator works: nothing, optimizer state and gradients, or its
    weights too."""


@frozen(kw_only=True)
class EvaluationConfig:
    """`[evaluation]`: pass@1 on the held-out set."""

    every_n_steps: TurnedOffBy0 = 0
    """Evaluate after every n-th step; 0 only where at_start and at_end say so."""
    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    max_prompts: NumRows | None = None
    """Use only the first so many prompts, of each data set."""
    samples_per_prompt: Annotated[int, between(1, 2**20)] = 1
    """Samples of one prompt; pass@1 is their mean success."""
    pass_at_k: Annotated[tuple[Positive, ...], EACH_ONCE] = (1,)
    """The k of pass@k, the chance that one of k samples of a prompt is right, each at most samples_per_prompt. pass@1 is
    measured in any case."""
    confidence_bounds: bool = False
    """Also measure the 95% confidence interval of each pass@k over prompts, as `pass@K_low` and `pass@K_high`; `rlcore eval`
    always does."""
    temperature: Annotated[float, at_least(0)] = 0.0
    """0.0 takes the most probable token."""
    top_k: TopK = 0
    """The same as `top_k` of [rollout], for evaluation."""
    top_p: TopP = 1.0
    """The same as `top_p` of [rollout], for evaluation."""


@frozen(kw_only=True)
class CheckpointConfig:
    """`[checkpoint]`: what is saved, when, and how much of it is kept."""

    every_n_steps: TurnedOffBy0 = 0
    """Save after every n-th step; 0 only where at_end says so."""
    at_end: bool = True
    """Save after the last step."""
    keep: Positive = 2
    """How many of the newest checkpoints to keep."""
    export: Literal["none", "hf", "peft"] = "none"
    """"hf" writes, after the last step, a directory `model` in the Hugging Face format, for other tools to load; adapters of
    [lora] are merged into it. "peft" writes the adapters alone, as a directory `adapter` in PEFT's format."""
    model_card: bool = True
    """Write into what is exported README.md, a model card: the base model, data sets, this recipe, versions, the final figures
    and the pictures that sinks drew at the end of the run. Needs `rlcore[hub]`."""
    push_to_hub: Repository | None = None
    """Upload the export to this repository of the Hub, "user/name", once the run is complete. A new repository is private.
    Needs `rlcore[hub]` and a token. The model card shows the recipe as it is, with its paths."""


@frozen(kw_only=True)
class LoggingConfig:
    """`[logging]`: which rollouts the run directory keeps, and which sinks get."""

    rollouts_every_n_steps: TurnedOffBy0 = 10
    """Write the step's rollouts, texts included, to rollouts/step-N.parquet; 0 never."""
    samples_every_n_steps: TurnedOffBy0 = 10
    """Give rollouts of every n-th step to sinks that show them, such as trackers of experiments; 0 never."""
    samples: Positive = 8
    """How many rollouts these get, spread evenly over the step's."""
    evaluation_answers: bool = True
    """Write the answers of each evaluation to rollouts/evaluation-N.parquet."""
    bundles_every_n_steps: TurnedOffBy0 = 0
    """Write every n-th step to bundles/step-N, which `rlcore replay` computes again; 0 never."""
    bundles_on_alarm: bool = False
    """Write a step to a bundle where its figures are not finite, where generator and trainer disagree beyond
    training.warn_token_mult_prob_error, or where reward or entropy fall to a quarter of their greatest."""
    bundle_weights: Literal["none", "model", "state"] = "none"
    """The weights at the beginning of the step, which a bundle holds: none; the model, or its adapters; or the trainer's state
    with its optimizer too."""


@frozen(kw_only=True)
class Recipe:
    """A whole recipe."""

    model: ModelConfig
    algorithm: NamedPluginChoice
    environment: NamedPluginChoice | None = None
    """None where demonstrations or preferences are trained on and nothing is evaluated."""
    reference: ReferenceConfig | None = None
    """None where the policy's beginning is the reference, or nothing compares with one."""
    run: RunConfig = field(factory=RunConfig)
    data: DataConfig = field(factory=DataConfig)
    trainer: PluginChoice = field(factory=PluginChoice)
    generator: PluginChoice = field(factory=PluginChoice)
    rollout: RolloutConfig = field(factory=RolloutConfig)
    async_: AsyncConfig = field(factory=AsyncConfig)
    training: TrainingConfig = field(factory=TrainingConfig)
    optimizer: OptimizerSpec = field(factory=OptimizerSpec)
    schedule: ScheduleSpec = field(factory=ScheduleSpec)
    critic: CriticConfig | None = None
    """None where the algorithm trains none, or one with the defaults of this section."""
    lora: LoraSpec | None = None
    """None where all weights train."""
    refit: RefitConfig = field(factory=RefitConfig)
    offload: OffloadConfig = field(factory=OffloadConfig)
    evaluation: EvaluationConfig = field(factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(factory=CheckpointConfig)
    checkpoint_evaluation: CheckpointEvaluationConfig | None = None
    """None where no program measures checkpoints."""
    logging: LoggingConfig = field(factory=LoggingConfig)
    cluster: ClusterConfig | None = None
    """None where one process does everything."""
    sinks: SinksConfig = field(factory=SinksConfig)
    observers: ObserversConfig = field(factory=ObserversConfig)
    plugins: PluginsConfig = field(factory=PluginsConfig)
    tables: Mapping[str, object] = field(factory=dict, metadata={NO_KEY: True})
    """The tables of observers of the loop that the recipe has, by name, as LoopObserverProvider.config checks them."""

    @property
    def evaluates(self) -> bool:
        """Return whether the held-out set is measured at any time."""
        wanted = self.evaluation.every_n_steps > 0 or self.evaluation.at_start or self.evaluation.at_end
        return self.environment is not None and self.data.evaluation is not None and wanted

    def algorithm_context(self, dtype: DtypeName, *, exact: bool) -> AlgorithmContext:
        """The facts that the algorithm gets; `exact` is its generation_logprobs_exact."""
        return AlgorithmContext(
            seed=self.run.seed,
            samples_per_prompt=self.rollout.samples_per_prompt,
            minibatches_per_step=self.training.updates_per_step,
            temperature=self.rollout.temperature,
            generation_logprobs_exact=exact,
            max_prompt_tokens=self.rollout.max_prompt_tokens,
            max_response_tokens=self.rollout.max_response_tokens,
            model=self.model.spec(dtype),
        )
