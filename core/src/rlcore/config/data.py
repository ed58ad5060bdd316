"""The section `[data]`: where prompts, and answers to learn, come from."""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import attrs
from attrs import field, frozen

from rlcore.schema.constraints import PathText, Positive, Text, above, above_at_most, at_least

Split: TypeAlias = Literal["train", "evaluation"]
"""The data sets of a recipe."""
LEVEL_WINDOW = 64
"""Groups that a curriculum's mean is of, where `data.level_window` does not say."""
NumRows: TypeAlias = Annotated[int, at_least(1, "Leave the key out for all rows.")]


@frozen(kw_only=True)
class RowsConfig:
    """The place of rows, and the names of their fields."""

    source: Text = "environment"
    """The environment's own rows, or a data source that `rlcore plugins` lists: "jsonl"; with `rlcore[datasets]` "csv", "json",
    "parquet" and "huggingface", a data set on the Hub. "python": the rows of a program (rlcore.train(…, dataset=rows))."""
    path: PathText | None = None
    """The file, from the recipe's folder, or a name on the Hub, which the source reads; none for "environment" and "python"."""
    format: Text = "auto"
    """The rows' layout, by a name in docs/data.md; "auto": that of the first row; "rlcore": the fields as they are."""
    subset: str | None = None
    """Configuration of a Hub data set; for "huggingface" and other sources that read it."""
    split: str | None = None
    """Split of a Hub data set, "train" where None; for "huggingface" and other sources that read it."""
    prompt_field: Text = "prompt"
    """Field with the prompt: a string, or a list of chat messages (the chat template is then applied)."""
    completion_field: Text = "completion"
    """Field with the completion to learn; read by algorithms that train on demonstrations."""
    messages_field: Text = "messages"
    """Field with a whole chat, of which the assistant's messages are learned; read by algorithms that train on demonstrations,
    in rows that have no completion. A field `tools` beside it lists what the assistant may call."""
    chosen_field: Text = "chosen"
    """Field with the better answer, text or chat messages; read by algorithms that train on preferences. Messages are the
    assistant's one behind the prompt's, or the whole conversation: the prompt is then what both answers' begin with."""
    rejected_field: Text = "rejected"
    """Field with the worse answer."""
    label_field: Text = "label"
    """Field with true for a desirable completion, false for another; read by algorithms that train on labelled completions."""
    margin_field: Text | None = None
    """Field with a number in every row: by how much the chosen answer is better; read by algorithms that ask for it."""
    limit: NumRows | None = None
    """Use only the first so many rows."""


@frozen(kw_only=True)
class MixedRowsConfig(RowsConfig):
    """`[data.train.mix.NAME]`, `[data.evaluation.mix.NAME]`: one of several data sets, the `data_set` of its rows."""

    weight: Annotated[float, above(0)] = 1.0
    """How many of the prompts that are trained on come from it, in relation to the other sets' weights; a set that is gone
    through begins anew. Only for [data.train]: all held-out rows are measured."""
    environment: str | None = None
    """The environment of its rows, whose section is [environment.NAME] as usual; None is environment.name."""


@frozen(kw_only=True)
class DatasetConfig(RowsConfig):
    """`[data.train]`, `[data.evaluation]`: where prompts come from."""

    mix: Mapping[str, MixedRowsConfig] | None = None
    """Several data sets in place of one, by names of your own: a table [data.train.mix.NAME] for each. The keys of rows, from
    `source` to `limit`, then stand there."""
    shuffle: bool = True
    """Shuffle anew each epoch, determined by the run's seed; evaluation keeps the file's order whatever this says."""
    max_prompt_tokens: Positive | None = None
    """Longest prompt of this data set, where that is to be less than rollout.max_prompt_tokens, which it is where None."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """Handling of rows whose prompts are over that limit, and of answers to learn over rollout.max_response_tokens: an error,
    or leave them out and report their number."""

    def parts(self) -> Mapping[str, "DatasetConfig"]:
        """Each data set of `mix` by itself, by its name."""
        shared = {name: getattr(self, name) for name in ("shuffle", "max_prompt_tokens", "on_long_prompt")}
        own = [attribute.name for attribute in attrs.fields(RowsConfig)]
        return {
            name: DatasetConfig(**{key: getattr(rows, key) for key in own}, **shared) for name, rows in (self.mix or {}).items()
        }


@frozen(kw_only=True)
class DataConfig:
    """`[data]`"""

    train: DatasetConfig = field(factory=DatasetConfig)
    evaluation: DatasetConfig | None = None
    """None where evaluation is off."""
    on_overlap: Literal["note", "error"] = "note"
    """Handling of held-out prompts that are trained on too: report their number, or end the run before it begins."""
    zero_variance_weight: Annotated[float, above_at_most(0, 1, "1.0 takes all prompts as often.")] = 1.0
    """How often a prompt is sampled whose last samples all had the same reward, as a share of the rate of other prompts. A
    comparison within such a group learns nothing. 1.0 is as often as others."""
    prompt_weights: Text | None = None
    """How often prompts come, by the rewards of their samples: a function of the group rlcore.prompt_weights, of which
    docs/recipes.md lists those that are released. None: as often as others."""
    curriculum_threshold: Annotated[float, above_at_most(0, 1, "It is a share of solved samples.")] | None = None
    """The share of solved samples that unlocks the next `level`: the mean over the present level's last `level_window` groups.
    Rows with the lowest level come first. Rows without a level always come. None: all rows come."""
    level_window: Positive | None = None
    """Groups of the present level that curriculum_threshold looks at. None: 64."""

    @property
    def environment_of_set(self) -> Mapping[str, str]:
        """The environment of each data set that names one."""
        mixes = [data.mix or {} for data in (self.train, self.evaluation) if data is not None]
        return {name: rows.environment for mix in mixes for name, rows in mix.items() if rows.environment is not None}
