"""Requirements of the batch-invariant kernels, which trainer and generator share; imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.requirements import Requirement

from rlcore.gpu import compute_capabilities
from rlcore.model_files import read_object
from rlcore.spi.context import CheckContext
from rlcore.spi.errors import Problem
from rlcore_torchkit.architectures.registry import find_architecture
from rlcore_torchkit.huggingface.model_check import config_file
from rlcore_torchkit.requirements import installed_version

KERNELS = Requirement("vllm==0.26.*")
"""The versions that were compared."""
CAPABILITY_MAJOR = 9
"""Hopper's: for it vLLM has the flash attention that gives a decoded token the bits that it has in a prompt."""
MODEL_TYPE = "qwen3"
HEAD_DIM = 128
"""The width of heads for which that attention takes blocks of as many keys for one token as for many."""
VOCABULARY_MULTIPLE = 64
"""To which vLLM fills a vocabulary up; rows of logits that begin elsewhere are summed otherwise."""
CHANNELS = ("cuda_ipc", "directory")
"""By which weights travel without the NCCL whose settings the mode changes, to an engine in a process of its own, since it
replaces operations of torch."""


def shared_kernels(parts: int) -> str:
    """Return the name of the kernels in Provider.shared_kernels, where products of tensor ranks are added in so many parts."""
    return f"vLLM's batch-invariant ({parts} ranks)" if parts > 1 else "vLLM's batch-invariant"


def invariance_problems(option: str, context: CheckContext, parts: int = 1) -> Iterator[Problem]:
    """Refuse a vLLM, device, model, dtype or channel that the kernels do not serve, where `option` asks for them; and `parts`
    that do not divide the model."""
    version = installed_version(KERNELS.name)
    if version is None or not KERNELS.specifier.contains(version.base_version):
        remedy = f"Install it where trainer and generator run, or set {option} to false"
        found = "true, without vLLM for CUDA" if version is None else f"true, with vLLM {version}"
        yield Problem(path=option, found=found, expected=f"{KERNELS}, whose kernels these are", remedy=remedy)
    yield from _device_problems(option, context)
    if context.model.dtype != "bfloat16":
        remedy = f"Or set {option} to false"
        yield Problem(path="model.dtype", found=f"{context.model.dtype}, with {option}", expected="bfloat16", remedy=remedy)
    if context.channel is not None and context.device == "cuda" and context.channel not in CHANNELS:
        found, expected = f"{context.channel}, with {option}", " or ".join(CHANNELS)
        yield Problem(path="refit.channel", found=found, expected=expected, remedy="Or let the two share a GPU")
    file = config_file(context)
    content = read_object(file)
    if not isinstance(content, Problem):
        yield from invariant_model_problems(option, content, str(file), parts)


def invariant_model_problems(option: str, content: Mapping[str, Any], path: str, parts: int = 1) -> Iterator[Problem]:
    """Refuse a config.json of another model than the kernels compute; `path` is the file's."""
    family = find_architecture(content, path)
    if content.get("model_type") != MODEL_TYPE or isinstance(family, Problem):
        found = f"true, for model_type {content.get('model_type')}"
        yield Problem(path=option, found=found, expected=f"false, or a model of model_type {MODEL_TYPE}")
        return
    if family.malformed_values(content, path):
        return  # which is said elsewhere
    config = family.standard(content)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield _model_problem(option, path, f"rope_type = {kind}", "default")
    if config.get("attention_bias"):
        yield _model_problem(option, path, "attention_bias = true", "false")
    if config.get("head_dim") != HEAD_DIM:
        yield _model_problem(option, path, f"head_dim = {config.get('head_dim')}", f"{HEAD_DIM}")
    if config["vocab_size"] % VOCABULARY_MULTIPLE:
        yield _model_problem(option, path, f"vocab_size = {config['vocab_size']}", f"a multiple of {VOCABULARY_MULTIPLE}")
    for key in ("num_attention_heads", "intermediate_size"):
        if config[key] % parts:
            remedy = "Set it to generator.vllm.tensor_parallel"
            yield Problem(
                path=f"{option}_parts", found=f"{parts}, for {key} = {config[key]}", expected="a divisor of it", remedy=remedy
            )


def _model_problem(option: str, path: str, found: str, expected: str) -> Problem:
    return Problem(path=path, found=found, expected=f"{expected}, with {option}", remedy="Set it to false for this model")


def _device_problems(option: str, context: CheckContext) -> Iterator[Problem]:
    expected = f"GPUs of compute capability {CAPABILITY_MAJOR}, such as H100 and H200"
    if context.device == "cpu":
        yield Problem(path=option, found="true on CPU", expected=expected, remedy="Set it to false")
        return
    others = sorted({found for found in compute_capabilities() or () if found[0] != CAPABILITY_MAJOR})
    if others:
        found = ", ".join(f"{major}.{minor}" for major, minor in others)
        yield Problem(path=option, found=f"true with compute capability {found}", expected=expected, remedy="Set it to false")
