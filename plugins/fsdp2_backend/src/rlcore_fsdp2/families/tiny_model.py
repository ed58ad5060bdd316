"""Tiny random models of any family."""

import string
from collections.abc import Sequence
from pathlib import Path

import torch

from rlcore import spi
from rlcore_fsdp2.families.corrections import CORRECTIONS
from rlcore_fsdp2.families.tiny import VOCAB_SIZE, tiny_options
from rlcore_torchkit.architectures.decoders import decoder_problems
from rlcore_torchkit.huggingface.models import model_errors
from rlcore_torchkit.testing.models import make_tokenizer


def make_tiny(model_type: str, class_name: str, directory: Path) -> Sequence[spi.Problem]:
    """Write a tiny random model of `model_type`, unless its configuration is refused: then returns the problems."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make_tokenizer(directory, alphabet=string.printable[: VOCAB_SIZE - 2])
    kind = CONFIG_MAPPING[model_type]
    correction = CORRECTIONS.get(model_type, {})
    config = kind(**tiny_options(kind(), correction))
    content = config.to_dict() | {"architectures": [class_name]}
    if problems := list(decoder_problems(content, "config.json", trust_remote_code=False)):
        return problems
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # norms are 1 and biases 0: they would say little
                tensor.add_(torch.linspace(-0.1, 0.1, len(tensor)))
        model(input_ids=torch.arange(2, 12)[None], use_cache=False)
    model.save_pretrained(directory)
    if not AutoConfig.from_pretrained(directory).architectures:
        raise ValueError("its configuration names no architecture")
    return []


def default_problems(model_type: str) -> Sequence[spi.Problem]:
    """Return the problems of a model_type of which transformers makes no configuration by default."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        with model_errors("config.json"):
            CONFIG_MAPPING[model_type]()
    except spi.ModelError as error:
        return error.problems
    return []
