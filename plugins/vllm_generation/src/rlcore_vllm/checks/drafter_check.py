"""Checks of a model that drafts, before anything is allocated; imports neither torch, transformers nor vLLM."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import fields

from rlcore.model_files import read_object
from rlcore.schema.file_limits import expanded
from rlcore.schema.suggestions import similar_path
from rlcore.spi import CheckContext, Problem
from rlcore_model_files.directory import TOKENIZER_FILE, file_problems, is_hub_name, stored_shapes, vocabulary
from rlcore_torchkit.architectures.decoders import described_family, is_image_model
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_vllm.setup.config import VllmConfig
from rlcore_vllm.setup.speculation import num_guessed

KEY, METHOD_KEY = "generator.vllm.speculative_model", "generator.vllm.speculative_method"
RENAMES = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""Parts of a draft model's path by which vLLM takes it for one of another method."""
MULTI_TOKEN_FAMILIES = ("deepseek_v3", "glm4_moe")
"""Families with multi-token heads, layers behind the last, by which vLLM guesses with the policy's own embedding and output
layer."""
MOST = "generator.vllm.speculative_most_sequences"
NUM_HEADS = "num_nextn_predict_layers"
"""The key of config.json."""
SHARED_KEYS = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size", NUM_HEADS)
"""Keys in which a multi-token head and the policy agree: vLLM builds the head by the policy's config.json."""


def speculation_problems(config: VllmConfig, policy_path: str) -> Iterator[Problem]:
    """Keys that exclude each other, or mean nothing without another; a head that cannot be looked at before the run."""
    most = config.speculative_most_sequences
    if most is not None and not num_guessed(config):
        remedy = "Set speculative_ngram or speculative_model, or leave it out"
        yield Problem(path=MOST, found=f"{most}, and nothing that drafts", expected="no such key without drafts", remedy=remedy)
    if not config.has_drafter:
        for key in ("speculative_method", "speculative_tokens"):
            default = getattr(fields(VllmConfig), key).default
            if (found := getattr(config, key)) != default:
                expected = "no such key without speculative_model"
                remedy = "speculative_ngram is the key of guesses without a model" if key == "speculative_tokens" else ""
                yield Problem(path=f"generator.vllm.{key}", found=f"{found}", expected=expected, remedy=remedy)
        return
    if config.speculative_ngram:
        found = f"{config.speculative_ngram}, with {_named(config)}"
        yield Problem(path="generator.vllm.speculative_ngram", found=found, expected="one of the two", remedy="Leave one out")
    if config.is_quantized:
        remedy = "vLLM would put the drafter into the policy's 8 bits too, in which nothing here has tried it"
        yield Problem(path=_key(config), found="a drafter beside a policy in 8 bits", expected="one of the two", remedy=remedy)
    if config.speculative_model is None and not expanded(policy_path).exists() and is_hub_name(policy_path):
        remedy = "A name on the Hub is not looked up here: download it first"
        expected = "a directory whose files have a multi-token head"
        yield Problem(path="model.path", found=f"{policy_path}, with {_named(config)}", expected=expected, remedy=remedy)


def drafter_problems(config: VllmConfig, context: CheckContext, policy: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse a drafter that cannot draft for the policy, whose config.json has this content."""
    if not config.has_drafter:
        return
    policy_directory = expanded(context.model.path)
    directory = policy_directory if config.speculative_model is None else expanded(config.speculative_model)
    if not directory.is_dir():
        remedy = similar_path(directory) or "A name on the Hub is not looked up here: download it first"
        yield Problem(path=KEY, found=f"{directory}, no such directory", expected="the drafter's directory", remedy=remedy)
        return
    damaged = list(file_problems(directory))
    if config.speculative_model is not None:  # else it is the run that says so
        yield from damaged
    drafter = read_object(directory / "config.json")
    if damaged or isinstance(drafter, Problem):
        return
    if is_image_model(policy):
        expected = "a model of text alone"
        found = "a drafter for a model that reads images"
        yield Problem(path=_key(config), found=found, expected=expected, remedy="Leave it out")
        return
    if config.speculative_method == "draft_model":
        yield from _draft_model_problems(directory, drafter, policy, policy_directory)
    elif config.speculative_method == "mtp":
        yield from _multi_token_problems(config, directory, drafter, policy, policy_directory)
    else:
        yield from _head_problems(config.speculative_method, directory, drafter, policy)


def drafter_dims(config: VllmConfig) -> ModelDims | None:
    """The sizes of the drafter; None where there is none, or its config.json does not tell them."""
    if config.speculative_model is None:
        return None
    drafter = read_object(expanded(config.speculative_model) / "config.json")
    return None if isinstance(drafter, Problem) else ModelDims.of(drafter)


def _draft_model_problems(
    directory: Path, drafter: Mapping[str, Any], policy: Mapping[str, Any], policy_directory: Path
) -> Iterator[Problem]:
    """A drafter that vLLM would take for another thing, or whose tokens are not the policy's."""
    method = _method_of(directory)
    if method is not None:
        found = f"{directory}, which vLLM takes for a drafter of the method {method} by its name"
        remedy = (
            "Rename the directory"
            if method not in ("eagle", "eagle3")
            else f'Set speculative_method = "{method}", or rename it'
        )
        yield Problem(path=KEY, found=found, expected='a draft model, by speculative_method = "draft_model"', remedy=remedy)
    if described_family(drafter, str(directory)) is None:
        found = f"a drafter of model_type {drafter.get('model_type')}"
        remedy = 'The multi-token head of a model is named by speculative_method = "mtp"'
        yield Problem(path=KEY, found=found, expected="a language model of a family that rlcore describes", remedy=remedy)
        return
    sizes = drafter.get("vocab_size"), policy.get("vocab_size")
    files = directory / TOKENIZER_FILE, policy_directory / TOKENIZER_FILE
    if sizes[0] != sizes[1]:
        yield Problem(
            path=KEY,
            found=f"a drafter with vocab_size = {sizes[0]}",
            expected=f"the policy's vocabulary, vocab_size = {sizes[1]}",
            remedy="Take a smaller model of the policy's own family, or resize the drafter's embeddings and save it",
        )
    elif all(file.is_file() for file in files) and not _same_tokens(*files):
        yield Problem(path=KEY, found=f"{files[0]}, with other tokens", expected=f"the tokens of {files[1]}")


def _method_of(directory: Path) -> str | None:
    """The other method that vLLM takes a drafter in this directory for, by its name."""
    return next((method for part, method in RENAMES.items() if part in str(directory).lower()), None)


def _key(config: VllmConfig) -> str:
    """The key that a drafter is chosen by."""
    return METHOD_KEY if config.speculative_model is None else KEY


def _named(config: VllmConfig) -> str:
    return 'speculative_method = "mtp"' if config.speculative_model is None else "speculative_model"


def _same_tokens(one: Path, other: Path) -> bool:
    contents = [read_object(file) for file in (one, other)]
    tables = [dict(vocabulary(content)) for content in contents if not isinstance(content, Problem)]
    return one.read_bytes() == other.read_bytes() or (len(tables) == 2 and tables[0] == tables[1])


def _head_problems(method: str, directory: Path, drafter: Mapping[str, Any], policy: Mapping[str, Any]) -> Iterator[Problem]:
    """A head of EAGLE that reads hidden states of another width, or was trained for other tokens."""
    widths = drafter.get("target_hidden_size") or drafter.get("hidden_size"), policy.get("hidden_size")
    for key, (found, expected) in {
        "hidden_size": widths,
        "vocab_size": (drafter.get("vocab_size"), policy.get("vocab_size")),
    }.items():
        if found != expected:
            yield Problem(
                path=str(directory / "config.json"),
                found=f"{key} = {found}",
                expected=f"{expected}, as the policy's",
                remedy=f"Take the head that {method.upper()} was trained to be for this model, or leave {KEY} out",
            )


def _multi_token_problems(
    config: VllmConfig, directory: Path, model: Mapping[str, Any], policy: Mapping[str, Any], policy_directory: Path
) -> Iterator[Problem]:
    """A multi-token head that is not there, is another model's, or that vLLM cannot guess with."""
    family, num_heads = policy.get("model_type"), policy.get(NUM_HEADS)
    if family not in MULTI_TOKEN_FAMILIES:
        expected = f"a family whose multi-token heads guess here: {', '.join(MULTI_TOKEN_FAMILIES)}"
        remedy = "Guess by speculative_ngram, or by a drafter that speculative_model names"
        yield Problem(path=METHOD_KEY, found=f'"mtp", with model_type {family}', expected=expected, remedy=remedy)
        return
    if not isinstance(num_heads, int) or num_heads < 1:
        found = f"no {NUM_HEADS}" if num_heads is None else f"{NUM_HEADS} = {num_heads}"
        expected, remedy = "1 or more: a model with a multi-token head", f"Take one that has it, or leave {METHOD_KEY} out"
        yield Problem(path=str(policy_directory / "config.json"), found=found, expected=expected, remedy=remedy)
        return
    if (method := _method_of(directory)) is not None:
        found = f"{directory}, which vLLM takes for a drafter of the method {method} by its name"
        yield Problem(path=_key(config), found=found, expected="a multi-token head", remedy="Rename the directory")
    others = [key for key in SHARED_KEYS if model.get(key) != policy.get(key)]
    for key in others:
        found, remedy = f"{key} = {model.get(key)}", f"Take the head of the policy's own model, or leave {KEY} out"
        expected = f"{policy.get(key)}, as the policy's"
        yield Problem(path=str(directory / "config.json"), found=found, expected=expected, remedy=remedy)
    if others:
        return
    first = policy.get("num_hidden_layers")
    layers = range(first, first + num_heads) if isinstance(first, int) else ()  # else the model's own problems are said
    wanted = [f"model.layers.{layer}.eh_proj.weight" for layer in layers]
    names = stored_shapes(directory)
    if missing := [name for name in wanted if name not in names]:
        found, expected = f"no {', '.join(missing)} in the files", f"the head that {NUM_HEADS} = {num_heads} speaks of"
        remedy = f"Some programs save models without it. Name a directory that has it by {KEY}"
        yield Problem(path=str(directory), found=found, expected=expected, remedy=remedy)
    tokens = config.speculative_tokens
    if tokens > num_heads and tokens % num_heads:
        expected = f"at most {num_heads}, or a multiple of it: each of the head's {num_heads} layers guesses as often"
        yield Problem(path="generator.vllm.speculative_tokens", found=f"{tokens}", expected=expected)
