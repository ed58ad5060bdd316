"""Capability names: what a recipe may need and a provider declares.

A declared capability must pass its part of the conformance kit; a recipe that needs an undeclared one is refused before
anything is allocated. `refit.NAME` is a channel's. A third party's own names contain a colon (`acme:speculative`); any other
unknown name is an error.
"""

# trainers
REFERENCE_POLICY = "reference_policy"
"""get_logprobs(model="reference"): a frozen copy of the initial weights."""
REFERENCE_MODEL = "reference_model"
"""TrainerContext.reference: get_logprobs(model="reference") asks another model than the policy's, maybe of another family and
size. Needs `reference_policy`."""
REFERENCE_ALONE = "reference_alone"
"""TrainerContext.needs_policy = False: the reference is held without a policy, without gradients and without an optimizer."""
ENTROPY = "entropy"
"""Entropy in get_logprobs, and in train_step with a gradient."""
SAVE_HF = "save_hf"
"""save_state(kind="hf"): a directory that transformers loads."""
METRIC_BOUNDS = "metric_bounds"
"""TrainStepRequest.bounds: a step whose metrics exceed them is refused before anything changes."""
PREVIOUS_LOGPROBS = "previous_logprobs"
"""LossSpec.previous_logprobs: the loss gets the log-probabilities at the start of the step as that field declares them."""
STEP_LOGPROBS = "step_logprobs"
"""TrainStepRequest.logprobs: the step returns the log-probabilities that its loss got."""
GRADIENT_NORMS = "gradient_norms"
"""TrainStepRequest.gradient_norms: the step returns the norm of each tensor's gradient."""
SCHEDULE_STEP = "schedule_step"
"""TrainStepRequest.schedule_step: the learning rate is read there, and not at the number of updates made."""
MULTI_RANK = "multi_rank"
"""Several ranks, each in its own process, form one trainer. From their parts of the data they compute what one rank computes
from all of it. A run of several ranks refuses a provider that does not declare it."""
SPLIT_STEP = "split_step"
"""forward_backward and optim_step: a step in pieces, whose settings the caller may choose for each."""
ROUTING_REPLAY = "routing_replay"
"""A token column ROUTED_EXPERTS decides which experts tokens go to, in train_step and in get_logprobs(model="policy")."""
SAMPLING_MASK_REPLAY = "sampling_mask_replay"
"""TokenBatch.sampling_mask: log-probabilities and entropies are those of the tokens that truncated sampling had kept, in
train_step and in get_logprobs, of the reference too."""
LORA = "lora"
"""TrainerContext.lora: adapters alone are trained and kept in checkpoints; save_state(kind="peft") writes them as PEFT does."""
ADAPTERS_TOGETHER = "adapters_together"
"""forward_backward_together: pieces of several adapters share forward and backward passes."""
MUON = "muon"
"""OptimizerSpec.name = "muon": Muon updates each matrix whole, in whatever parts ranks hold it."""
MOMENTS_8BIT = "moments_8bit"
"""OptimizerSpec.moments = "8bit": AdamW's two moments are kept in 8 bits, in the same blocks under every layout."""
OPTIMIZER_GROUPS = "optimizer_groups"
"""OptimizerSpec.groups: tensors have settings by their names; a pattern that matches none is refused."""
VALUE_HEAD = "value_head"
"""TrainerContext.head = "value": the model gives a value after each token, by get_values and to the loss, in place of
log-probabilities."""

# generators
TOP_K = "top_k"
TOP_P = "top_p"
STOP_STRINGS = "stop_strings"
PER_SAMPLE_SEEDS = "per_sample_seeds"
"""A sample depends on its prompt, seed and weights alone, not on the batch around it (same device, same dtype)."""
EXACT_LOGPROBS = "exact_logprobs"
"""Log-probabilities equal a plain forward pass in float32 within 1e-4, so that nothing need recompute a generator's. A trainer
declares it to take it away where a section rounds, as to 8 bits (Provider.disabled_capabilities); others compute so anyway."""
SAMPLING = frozenset({TOP_K, TOP_P, STOP_STRINGS, PER_SAMPLE_SEEDS, EXACT_LOGPROBS})
"""The capabilities of a generator that samples, exactly, in every way that a recipe may ask for."""

STREAMING = "streaming"
"""GenerateRequest.on_finished: each sample is handed out as soon as it ends."""
CONTINUOUS = "continuous"
"""stream: requests join while others run, samples are handed out as they end, and at its end those that have not ended too."""
TOKEN_STREAMING = "token_streaming"
"""GenerateRequest.readers: readers get tokens as they are sampled, and may end a sample. Held within the driver's process."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""TokenReader.on_prompt: readers get the log-probabilities of their prompt's tokens. Needs `token_streaming`."""
IN_FLIGHT_REFIT = "in_flight_refit"
"""refit while generate or stream runs in another thread: tokens sampled after it carry the new version; sampling goes on."""
DISCARD_WEIGHTS = "discard_weights"
"""SetResidencyRequest.discard_weights: device memory is freed without a copy on the host."""
OWN_WEIGHTS = "own_weights"
"""GeneratorContext.channel = None: it reads the model's own weights, as `rlcore serve` needs, which runs no trainer."""
ROUTED_EXPERTS = "routed_experts"
"""GenerateRequest.routed_experts: the result says which experts of a mixture-of-experts model each token went to."""
STRUCTURED_OUTPUT = "structured_output"
"""SamplingParams.json_schema: samples fulfil a JSON Schema. Sampling masks have the tokens that it and truncation kept."""
SAMPLING_MASK = "sampling_mask"
"""GenerateRequest.sampling_mask: the result says which tokens truncated sampling chose each token among."""

# environments
AGENT = "agent"
"""run(row, seed, session) in place of reset and step: episodes run by themselves and ask the policy through OpenAI's API."""
CHEAP_RESET = "cheap_reset"
"""reset is quick and depends on its row alone: the core resets every row once before a run, to check prompt lengths."""
REWARD_FUNCTIONS = "reward_functions"
"""EnvironmentContext.reward_functions: it rewards samples by functions that a program hands over."""
NO_REWARDS = "no_rewards"
"""Every reward is 0: it brings prompts alone, for algorithms that learn from something else."""

# trainers and generators
IMAGES = "images"
"""TokenBatch.images of a trainer, GenerateRequest.images of a generator: sequences of models that read images besides text."""
ADAPTER_REFIT = "adapter_refit"
"""ExportWeightsRequest.adapters and GeneratorContext.lora: adapters are sent without the weights that they do not change, and
generation adds them to these."""
MANY_ADAPTERS = "many_adapters"
"""Several adapters on one base model. A trainer's train by turns, and none changes a bit of another (use_adapter). A generator
holds several, each with a version, and requests name the one that samples (GeneratorContext.max_adapters)."""
DELTA_REFIT = "delta_refit"
"""ExportWeightsRequest.delta and RefitRequest.delta: refits bring changes alone, to copies that both ends keep."""
RESIDENCY = "residency"
"""set_residency frees and restores device memory; without it only the fully resident state is accepted."""
IN_PROCESS = "refit.in_process"
"""The channel "in_process": tensors are handed over within a process."""
SHARDS = "refit.shards"
"""The channel "shards" and, of trainers, ExportWeightsRequest.sharded: ranks send the parts that they hold."""
PROCESS_CHANNELS = "process_channels"
"""Refits by any channel that has a sender and a receiver and the reach "process". A trainer exports torch tensors on its own
device, which every sender takes; a generator builds and calls both ends. A generator in the trainer's process takes those of
the reach "anywhere" too."""
SHARED_CHANNELS = "shared_channels"
"""Likewise, by any channel of the reach "shared"."""
SEPARATE_CHANNELS = "separate_channels"
"""Likewise, by any channel of the reach "separate"."""
ANYWHERE_CHANNELS = "anywhere_channels"
"""Likewise, by any channel of the reach "anywhere"."""
ANY_CHANNEL = frozenset({PROCESS_CHANNELS, SHARED_CHANNELS, SEPARATE_CHANNELS, ANYWHERE_CHANNELS})
"""The capabilities of trainers and generators that are written in torch."""

KNOWN: frozenset[str] = frozenset(value for name, value in list(globals().items()) if name.isupper() and isinstance(value, str))
"""The constants of this module. Beside them there is `refit.NAME` for each channel that a trainer or a generator knows."""


def is_known(capability: str) -> bool:
    """Return whether a capability is one of rlcore's, or of a channel, or a third party's own."""
    return capability in KNOWN or capability.startswith("refit.") or ":" in capability
