"""The families that Megatron computes beside those that are described for all trainers."""

from rlcore_megatron.families.deepseek_v3 import deepseek_v3
from rlcore_megatron.families.gemma import gemma2, gemma3_text
from rlcore_megatron.families.glm4_moe import glm4_moe
from rlcore_megatron.families.gpt_oss import gpt_oss
from rlcore_torchkit.architectures.registry import Families

FAMILIES: Families = {
    "deepseek_v3": deepseek_v3,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "glm4_moe": glm4_moe,
    "gpt_oss": gpt_oss,
}
"""By model_type: what makes the family from the content of a config.json."""
