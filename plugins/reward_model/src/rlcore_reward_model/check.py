"""Check a recipe's `[environment.reward_model]` by files alone."""

import os
from collections.abc import Iterator, Sequence

from rlcore.model_files import CONFIG_FILE, read_object
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import CheckContext, ModelSpec, Note, Problem
from rlcore_model_files.directory import model_problems
from rlcore_reward_model.config import RewardModelConfig
from rlcore_reward_model.plan import known_model
from rlcore_torchkit.huggingface.class_trial import class_problems

SECTION = "environment.reward_model"


def check(context: CheckContext, config: RewardModelConfig) -> Sequence[Problem | Note]:
    """Return files that are missing, a model that is no such classifier, and keys that exclude each other; a note where it
    takes memory of a device that others plan with, and nothing tells how much."""
    problems = [*_model_problems(config), *_option_problems(context, config)]
    return problems or list(_memory_notes(context, config))


def _memory_notes(context: CheckContext, config: RewardModelConfig) -> Iterator[Note]:
    if config.device == "cuda" and not config.base_urls and known_model(config) is None:
        keys = " and ".join(sorted(context.planned_options))
        remedy = f"Set {keys} of the generator to less" if keys else "Leave it room there"
        directory = expanded(config.path)
        similar = "" if directory.exists() else similar_path(directory)
        text = (
            f"is on the first device, and how much it takes is not known, since no directory {config.path} with a config.json "
            "of its sizes is here: trainer and generator do not count it in what they plan to take of that device. "
            f"{f'{similar} ' if similar else ''}{remedy}, name a directory, or compute on the CPU"
        )
        yield Note(path=f"{SECTION}.device", text=text)


def _model_problems(config: RewardModelConfig) -> Iterator[Problem]:
    problems = model_problems(config.path, reads_weights=not config.base_urls)
    yield from problems
    if config.base_urls:
        return  # the servers have the model
    file = expanded(config.path) / CONFIG_FILE
    content = read_object(file)
    if problems or isinstance(content, Problem):
        return  # or it is on the Hub, and looked at when it is loaded
    classes = content.get("architectures") or ["none"]
    num_labels = len(content.get("id2label") or "01")  # transformers takes two where the file names none
    if not str(classes[0]).endswith("ForSequenceClassification"):
        expected = "a sequence classifier with one label"
        remedy = 'Name the directory that a run with the algorithm "bradley_terry" and checkpoint.export = "hf" has written.'
        yield Problem(path=str(file), found=f"architecture {classes[0]}", expected=expected, remedy=remedy)
    elif num_labels != 1:
        yield Problem(path=str(file), found=f"{num_labels} labels", expected="one label, whose value is the reward")
    else:
        yield from class_problems(ModelSpec(path=config.path), "value")


def _option_problems(context: CheckContext, config: RewardModelConfig) -> Iterator[Problem]:
    if config.system_prompt is not None and config.prompt_format == "text":
        expected, remedy = 'none where prompt_format = "text"', 'Put it into the prompts, or set prompt_format = "chat".'
        yield Problem(path=f"{SECTION}.system_prompt", found="a text", expected=expected, remedy=remedy)
    default = RewardModelConfig(path=config.path)
    ours, theirs = ("device", "dtype", "max_batch"), ("model", "api_key_env", "timeout_s", "max_attempts", "max_concurrent")
    for key in ours if config.base_urls else theirs:
        if (value := getattr(config, key)) != getattr(default, key):
            remedy = (
                "The servers' own options decide." if config.base_urls else "Name the servers in base_urls, or leave it out."
            )
            with_or_without = "with" if config.base_urls else "without"
            yield Problem(
                path=f"{SECTION}.{key}", found=repr(value), expected=f"none {with_or_without} base_urls", remedy=remedy
            )
    for url in config.base_urls:
        if not url.startswith(("http://", "https://")):
            expected = "an address that begins with http:// or https://"
            yield Problem(path=f"{SECTION}.base_urls", found=repr(url), expected=expected)
    if config.api_key_env is not None and not os.environ.get(config.api_key_env):
        found = f"{config.api_key_env}, which is not set"
        yield Problem(path=f"{SECTION}.api_key_env", found=found, expected="a variable of the environment")
    limit_s = context.environment_timeout_s
    if config.base_urls and limit_s is not None and config.timeout_s >= limit_s:
        expected = f"less than rollout.environment_timeout_s, which is {limit_s:g}"
        yield Problem(path=f"{SECTION}.timeout_s", found=f"{config.timeout_s:g}", expected=expected)
    if config.device == "cuda" and context.device == "cpu" and not config.base_urls:
        yield Problem(path=f"{SECTION}.device", found='"cuda", in a run on cpu', expected='"cpu"')
