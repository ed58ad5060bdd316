"""What is wrong with a model that drafts, found before anything is allocated; imports neither torch, transformers nor vLLM."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import fields

from rlcore.model_files import TOKENIZER_FILE, file_problems, read_object, vocabulary
from rlcore.schema.suggestions import similar_path
from rlcore.spi import CheckContext, Problem
from rlcore_torchkit.architectures.dims import ModelDims
from rlcore_torchkit.decoders import described_family, is_image_model
from rlcore_vllm.config import VllmConfig

KEY = "generator.vllm.speculative_model"
RENAMES = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""What vLLM, where it finds it in the path of a draft model, takes for the name of another method."""


def speculation_problems(config: VllmConfig) -> Iterator[Problem]:
    """Keys that exclude each other, or mean nothing without another."""
    if config.speculative_model is None:
        for key in ("speculative_method", "speculative_tokens"):
            default = getattr(fields(VllmConfig), key).default
            if (found := getattr(config, key)) != default:
                expected = "no such key without speculative_model"
                remedy = "speculative_ngram is the key of guesses without a model" if key == "speculative_tokens" else ""
                yield Problem(path=f"generator.vllm.{key}", found=f"{found}", expected=expected, remedy=remedy)
        return
    if config.speculative_ngram:
        found = f"{config.speculative_ngram}, with speculative_model"
        yield Problem(path="generator.vllm.speculative_ngram", found=found, expected="one of the two", remedy="Leave one out")
    if config.is_quantized:
        remedy = "vLLM would put the drafter into the policy's 8 bits too, in which nothing here has tried it"
        yield Problem(path=KEY, found="a drafter beside a policy in 8 bits", expected="one of the two", remedy=remedy)


def drafter_problems(config: VllmConfig, context: CheckContext, policy: Mapping[str, Any]) -> Iterator[Problem]:
    """Why the drafter cannot draft for the policy, whose config.json has this content."""
    if config.speculative_model is None:
        return
    directory = Path(config.speculative_model).expanduser()
    if not directory.is_dir():
        remedy = similar_path(directory) or "A name on the Hub is not looked up here: download it first"
        yield Problem(path=KEY, found=f"{directory}, no such directory", expected="the drafter's directory", remedy=remedy)
        return
    damaged = list(file_problems(directory))
    yield from damaged
    drafter = read_object(directory / "config.json")
    if damaged or isinstance(drafter, Problem):
        return
    if is_image_model(policy):
        expected = "a model of text alone"
        yield Problem(path=KEY, found="a drafter for a model that reads images", expected=expected, remedy="Leave it out")
        return
    if config.speculative_method == "draft_model":
        yield from _draft_model_problems(directory, drafter, policy, Path(context.model.path).expanduser())
    else:
        yield from _head_problems(config.speculative_method, directory, drafter, policy)


def drafter_dims(config: VllmConfig) -> ModelDims | None:
    """The sizes of the drafter; None where there is none, or its config.json does not tell them."""
    if config.speculative_model is None:
        return None
    drafter = read_object(Path(config.speculative_model).expanduser() / "config.json")
    return None if isinstance(drafter, Problem) else ModelDims.of(drafter)


def _draft_model_problems(
    directory: Path, drafter: Mapping[str, Any], policy: Mapping[str, Any], policy_directory: Path
) -> Iterator[Problem]:
    """A drafter that vLLM would take for another thing, or whose tokens are not the policy's."""
    method = next((method for part, method in RENAMES.items() if part in str(directory).lower()), None)
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
        remedy = "Heads of several tokens (MTP) in a checkpoint are not used: refits do not send them"
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
