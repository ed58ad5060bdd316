"""Checks that a model has a trainable head for the token after the next; imports no torch."""

from collections.abc import Iterator, Mapping
from typing import Any

from attrs import fields

from rlcore.spi import CheckContext, Problem
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.layouts.layout_check import option_problem
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.architectures.dims import ModelDims

NUM_HEADS = "num_nextn_predict_layers"
"""The key of config.json."""


def head_option_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Options that a multi-token head does not go together with, or that nothing would read."""
    weight = config.mtp_loss_weight
    if not config.mtp:
        if weight != fields(MegatronConfig).mtp_loss_weight.default:
            yield option_problem("mtp_loss_weight", f"{weight}, with mtp = false", "no such key", "Or set mtp to true")
        return
    if context.head == "value":
        yield option_problem("mtp", "true, with an algorithm that trains a model of values", "false")
    if context.lora is not None:
        remedy = "The trunk's weights stay as they are then, and the head with them"
        yield option_problem("mtp", "true, with [lora]", "false", remedy)
    for name in ("pretrained_checkpoint", "conversion_cache"):
        if value := getattr(config, name):
            remedy = "Or leave out mtp: the head is read from Hugging Face's files alone"
            yield option_problem(name, f"{str(value).lower()}, with mtp", "no such key", remedy)
    for name in ("transformer_engine", "fp8"):
        if getattr(config, name):
            remedy = "Or leave out mtp: its layers, and the trunk's beside it, are Megatron's own"
            yield option_problem(name, "true, with mtp", "false", remedy)


def head_problems(family: MegatronFamily, config: MegatronConfig, model: Mapping[str, Any], path: str) -> Iterator[Problem]:
    """Refuse a model, by its config.json at `path`, whose multi-token head cannot train, where the recipe wants one."""
    if not config.mtp:
        return
    found = model.get(NUM_HEADS)
    if not family.has_multi_token_head:
        expected = "a family whose files have such a head: DeepSeek-V3 or GLM-4.5"
        remedy = "Leave mtp out"
        yield option_problem("mtp", f"true, with model_type {family.model_type}", expected, remedy)
        return
    if found != 1:
        expected = "1: a second head's input is no one form of those in use"
        told = f"no {NUM_HEADS}" if found is None else f"{NUM_HEADS} = {found}"
        yield Problem(path=path, found=f"{told}, with trainer.megatron.mtp", expected=expected, remedy="Leave mtp out")
    dims = ModelDims.of(model)
    if dims is not None and dims.tied:
        expected = "false: files have the head's output layer apart from its embedding"
        yield Problem(path=path, found="tie_word_embeddings = true, with trainer.megatron.mtp", expected=expected)
    if dims is not None and not (dims.has_experts and dims.has_experts[-1]):
        expected = "experts in it: the head's layer has the form of the last, and experts in the files"
        yield Problem(path=path, found="a last layer without experts, with trainer.megatron.mtp", expected=expected)
