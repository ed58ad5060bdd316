"""The models of a run: the sections `[model]`, `[reference]` and `[critic]`."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

from attrs import evolve, field, frozen

from rlcore.schema.constraints import KNOWN_HOME, Constraint, Count, above, at_least, not_empty
from rlcore.spi import DtypeName, ModelSpec, OptimizerGroup, OptimizerSpec

_RESERVED = (
    "messages conversation chat_template tools documents tokenize add_generation_prompt continue_final_message padding "
    "truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs"
)
RESERVED_TEMPLATE_ARGUMENTS = tuple(_RESERVED.split())
"""Arguments of transformers' apply_chat_template, which are no variables for a recipe to set."""

_NOT_RESERVED = Constraint(
    "without what the core itself gives to the template",
    lambda value: not value.keys() & set(RESERVED_TEMPLATE_ARGUMENTS),
    f"Leave out {', '.join(RESERVED_TEMPLATE_ARGUMENTS)}.",
)
TemplateVariables: TypeAlias = Annotated[Mapping[str, str | bool | int | float], _NOT_RESERVED]


@frozen(kw_only=True)
class ModelConfig:
    """`[model]`: the policy, and the frozen reference where one is needed and [reference] names no other."""

    path: Annotated[str, not_empty("Give a local Hugging Face directory or a name on the Hub."), KNOWN_HOME]
    """A local Hugging Face directory, or a name on the Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["auto", "float64", "float32", "bfloat16"] = "auto"
    """Compute dtype; "auto" is bfloat16 on CUDA and float32 on CPU. Master weights are float32, or float64 with "float64"."""
    trust_remote_code: bool = False
    """Allow code that comes with the model to run."""
    chat_template: Annotated[str, not_empty("Leave the key out for the tokenizer's own template.")] | None = None
    """Jinja chat template in place of the tokenizer's, or the name of one of the tokenizer's templates."""
    chat_template_kwargs: TemplateVariables = field(factory=dict)
    """Variables that the chat template reads, such as enable_thinking = false for Qwen3's. A template that asks for the date is
    told 26 July 2024, so that prompts are the same on any day; Llama's take another one from a variable date_string."""

    def spec(self, auto_dtype: DtypeName) -> ModelSpec:
        """The facts about the model that backends get; `auto_dtype` is the compute dtype for "auto"."""
        dtype = auto_dtype if self.dtype == "auto" else self.dtype
        return ModelSpec(path=self.path, revision=self.revision, dtype=dtype, trust_remote_code=self.trust_remote_code)


@frozen(kw_only=True)
class ReferenceConfig:
    """`[reference]`: the frozen reference model; the default is the policy's initial weights. It may be a teacher, or the
    initial model of earlier training. It has the policy's tokenizer, and any size."""

    path: Annotated[str, not_empty("Give a local Hugging Face directory or a name on the Hub."), KNOWN_HOME]
    """A local Hugging Face directory, or a name on the Hub. It computes in model.dtype."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    trainer: Mapping[str, str | bool | int | float] = field(factory=dict)
    """With cluster.reference_gpus_per_node, options of the trainer's plugin for this model in place of those in its section of
    [trainer], such as tensor_parallel for a teacher that one device cannot hold."""


Offload: TypeAlias = Literal["none", "state", "all"]


@frozen(kw_only=True)
class CriticConfig:
    """`[critic]`: the value model of actor-critic algorithms, which predicts returns. It uses the policy's trainer, layout,
    schedule, processes and devices. All of its weights train, with or without [lora]. Keys default to those of [optimizer]."""

    path: Annotated[str, not_empty("Leave the key out for the policy's own model."), KNOWN_HOME] | None = None
    """A local Hugging Face directory, or a name on the Hub, of any size and with the policy's tokenizer; None is model.path.
    Values begin at 0, or with the value head in the directory, such as a reward model's."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; with `path` alone."""
    learning_rate: Annotated[float, above(0)] | None = None
    """Peak learning rate."""
    weight_decay: Annotated[float, at_least(0)] | None = None
    """Decoupled decay of weight matrices."""
    max_grad_norm: Annotated[float, at_least(0, "0.0 never scales gradients down.")] | None = None
    """Gradients are scaled down to this global L2 norm; 0.0 never."""
    name: Literal["adamw", "muon"] | None = None
    """The same as [optimizer]'s."""
    moments: Literal["float32", "8bit"] | None = None
    """The same as [optimizer]'s."""
    groups: tuple[OptimizerGroup, ...] | None = None
    """The same as [optimizer]'s, over the critic's tensors; an empty array for none."""
    warmup_steps: Count = 0
    """First steps of the run that train the critic alone, while the policy stays as it is. The policy's schedule begins after
    them."""
    export: bool = False
    """Write, after the last step, a directory `critic` in the Hugging Face format, a model for sequence classification with one
    label: what another run's critic may begin with."""
    offload: Offload = "none"
    """The parts that leave the GPU's memory while the critic is idle, for the policy to train and the generator to run:
    nothing, optimizer state and gradients, or its weights too. While the generator works, offload.trainer moves it as well."""

    def optimizer(self, policy: OptimizerSpec) -> OptimizerSpec:
        """Its own, given the policy's."""
        names = ("learning_rate", "weight_decay", "max_grad_norm", "name", "moments", "groups")
        own = {name: getattr(self, name) for name in names}
        return evolve(policy, **{name: value for name, value in own.items() if value is not None})
