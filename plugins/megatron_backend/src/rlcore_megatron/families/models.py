"""torchkit's checks and loading of models, for the installed families and those that Megatron computes besides."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from rlcore.spi import Problem
from rlcore_megatron.families.deepseek_v3 import deepseek_v3
from rlcore_megatron.families.family import MegatronFamily
from rlcore_megatron.families.gemma import gemma2, gemma3_text
from rlcore_megatron.families.glm4_moe import glm4_moe
from rlcore_megatron.families.gpt_oss import gpt_oss
from rlcore_megatron.families.minimax_m2 import minimax_m2
from rlcore_megatron.families.qwen3_next import qwen3_5_moe_text, qwen3_5_text, qwen3_next
from rlcore_megatron.families.qwen_vl import qwen2_5_vl, qwen2_vl, qwen3_vl
from rlcore_megatron.families.sparse_latent import deepseek_v32, glm_moe_dsa
from rlcore_torchkit.adapters import lora_targets
from rlcore_torchkit.architectures import registry
from rlcore_torchkit.architectures.registry import Families
from rlcore_torchkit.huggingface import model_check, models

FAMILIES: Families = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v32": deepseek_v32,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "glm4_moe": glm4_moe,
    "glm_moe_dsa": glm_moe_dsa,
    "gpt_oss": gpt_oss,
    "minimax_m2": minimax_m2,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_vl": qwen2_vl,
    "qwen3_5_moe_text": qwen3_5_moe_text,
    "qwen3_5_text": qwen3_5_text,
    "qwen3_next": qwen3_next,
    "qwen3_vl": qwen3_vl,
}
"""By model_type: what makes the family from the content of a config.json."""


load_config = partial(models.load_config, families=FAMILIES)
standard_config = partial(models.standard_config, families=FAMILIES)
dims_of = partial(models.dims_of, families=FAMILIES)
may_lack_value_head = partial(models.may_lack_value_head, families=FAMILIES)
model_config = partial(model_check.model_config, families=FAMILIES)
trained_model_problems = partial(model_check.trained_model_problems, families=FAMILIES)
reference_problems = partial(model_check.reference_problems, families=FAMILIES)
lora_problems = partial(lora_targets.lora_problems, families=FAMILIES)


def architecture_of(hf: Any) -> MegatronFamily:
    """The family of a transformers config; ModelError where Megatron computes none such."""
    return MegatronFamily.of(models.architecture_of(hf, FAMILIES))


def find_family(config: Mapping[str, Any], path: str) -> MegatronFamily | Problem:
    """The family of the model whose config.json has this content and lies at `path`, or why there is none."""
    found = registry.find_architecture(config, path, FAMILIES)
    return found if isinstance(found, Problem) else MegatronFamily.of(found)
