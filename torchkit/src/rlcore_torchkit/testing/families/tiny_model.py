"""Tiny random models of any family."""

import json
import shutil
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from rlcore import spi
from rlcore_torchkit.architectures.decoders import decoder_problems
from rlcore_torchkit.testing.families.corrections import CORRECTIONS
from rlcore_torchkit.testing.families.tiny import INITIAL, SIZES, VOCAB_SIZE, tiny_options
from rlcore_torchkit.testing.models import make_tokenizer

_ASKED = ("is_decoder", "causal", "attention_type")
"""Options that make a class a causal decoder."""


def make_tiny(
    model_type: str,
    class_name: str,
    directory: Path,
    *,
    sizes: Mapping[str, int] = SIZES,
    initial: float = INITIAL,
    further: Mapping[str, Any] = {},
) -> str:
    """Write a tiny random model of `model_type`; returns the options without which tokens would see later ones.

    `sizes` are the values of fields by their names, `initial` is the standard deviation of weights; `further` options come
    after the family's own. ModelError where the configuration is refused.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    make_tokenizer(directory, alphabet=string.printable[: VOCAB_SIZE - 2])
    kind = CONFIG_MAPPING[model_type]
    correction = {**CORRECTIONS.get(model_type, {}), **further}
    default = _default(kind, correction)
    options = tiny_options(default, correction, sizes, initial)
    config = kind(**options)
    content = config.to_dict() | {"architectures": [class_name]}
    if problems := list(decoder_problems(content, "config.json", trust_remote_code=False)):
        raise spi.ModelError(problems)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point() and tensor.ndim == 1:  # norms are 1 and biases 0: they would say little
                tensor.add_(torch.linspace(-0.1, 0.1, len(tensor)))
        model(input_ids=torch.arange(2, 12)[None], use_cache=False)
    model.save_pretrained(directory)
    if not AutoConfig.from_pretrained(directory).architectures:
        raise ValueError("its configuration names no architecture")
    changed = {name: value for name in _ASKED if name in options and (value := getattr(default, name)) != options[name]}
    if not changed or _is_causal(AutoModelForCausalLM.from_config(kind(**{**options, **changed}), dtype=torch.float32)):
        return ""
    return ", ".join(f"{name} = {json.dumps(options[name])}" for name in changed)


def vary(directory: Path, target: Path, seed: int) -> Path:
    """Write the model of `directory` with other values, which are random by `seed` and which bfloat16 holds; returns `target`.

    Each value is multiplied by a number of its own between 0.5 and 1.5, so that a tensor that keeps earlier values shows.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    shutil.copytree(directory, target)
    generator = torch.Generator().manual_seed(seed)
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, "pt") as content:
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - it is no mapping
            metadata = content.metadata()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                factors = 0.5 + torch.rand(tensor.shape, generator=generator)
                tensors[name] = (tensor * factors).bfloat16().to(tensor.dtype)
        save_file(tensors, file, metadata)
    return target


def _default(kind: Any, correction: Mapping[str, Any]) -> Any:
    """Return the configuration of a class by default; the corrected one where the class refuses its own defaults."""
    try:
        return kind()
    except StrictDataclassError:
        return kind(**correction)


@torch.no_grad()
def _is_causal(model: Any) -> bool:
    """Return whether no token sees later ones."""
    tokens = torch.arange(2, 12)[None]
    whole, part = (model.eval()(input_ids=row, use_cache=False).logits[:, :5] for row in (tokens, tokens[:, :5]))
    return bool(torch.allclose(whole, part, atol=1e-4))
