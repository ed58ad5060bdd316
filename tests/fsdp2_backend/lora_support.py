"""Adapters as PEFT computes and writes them, by plain transformers and torch: what every trainer is compared with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsdp2_support
import torch
from attrs import evolve
from fsdp2_support import Reference, make_batch, make_context
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import LoraSpec, SaveStateRequest, TrainerContext

NUM_STEPS = 3
NUM_SEQUENCES = 8
SPEC = LoraSpec(rank=3, alpha=6.0)
"""A rank that two ranks cannot divide."""
OPTIMIZER = evolve(fsdp2_support.OPTIMIZER, learning_rate=1e-3, eps=1e-5)
"""With torch's own eps, Adam would blow up what float32 rounds in gradients near zero."""
BATCHES = tuple(make_batch(seed=seed, num_sequences=NUM_SEQUENCES, max_length=11) for seed in range(NUM_STEPS))
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


class LoraLinear(nn.Module):
    """W x + b + alpha / rank · B A x."""

    def __init__(self, base: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a, self.b = (nn.Parameter(factor.to(base.weight.dtype).clone()) for factor in (a, b))

    def forward(self, states: Tensor) -> Tensor:
        return self.base(states) + self.scale * (states @ self.a.T) @ self.b.T


class LoraReference(Reference):
    """Plain transformers in float64 with adapters from a PEFT directory, and torch's AdamW over these alone."""

    def __init__(self, directory: Path, adapter: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, **EAGER)
        self.model.requires_grad_(False)
        self.spec, self.layers = OPTIMIZER, {}
        config, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / TENSORS)
        for key in sorted(name for name in tensors if name.endswith("lora_A.weight")):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            factors = tensors[key], tensors[key.replace("lora_A", "lora_B")]
            self.layers[name] = LoraLinear(self.model.get_submodule(name), *factors, config["lora_alpha"] / config["r"])
            self.model.set_submodule(name, self.layers[name])
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        options = {"weight_decay": OPTIMIZER.weight_decay, "fused": False, "foreach": False, "eps": OPTIMIZER.eps}
        self.optimizer = torch.optim.AdamW(parameters, lr=OPTIMIZER.learning_rate, **options)

    def adapters(self) -> dict[str, Tensor]:
        """Under PEFT's names."""
        factors = {"A": "a", "B": "b"}
        return {
            f"base_model.model.{name}.lora_{key}.weight": getattr(layer, attribute).detach().clone()
            for name, layer in self.layers.items()
            for key, attribute in factors.items()
        }

    def merged(self) -> dict[str, Tensor]:
        """W + alpha / rank · B A, by the layers' names."""
        return {name: (each.base.weight + each.scale * each.b @ each.a).detach() for name, each in self.layers.items()}


def linear_names(directory: Path) -> dict[str, tuple[int, int]]:
    """Every nn.Linear of the model but the head, as PEFT's "all-linear" counts them, with its shape."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: tuple(module.weight.shape) for name, module in linear.items() if name != "lm_head"}


def write_adapter(directory: Path, model: Path, spec: LoraSpec = SPEC, seed: int = 1, **changes: Any) -> Path:
    """A PEFT directory of random adapters for the linear layers of a model; `changes` are of its config."""
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (rows, columns) in linear_names(model).items():
        if any(target in ("all-linear", name.rpartition(".")[2]) for target in spec.targets):
            tensors[f"base_model.model.{name}.lora_A.weight"] = 0.1 * torch.randn(spec.rank, columns, generator=random)
            tensors[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(rows, spec.rank, generator=random)
    directory.mkdir(parents=True)
    save_file(tensors, directory / TENSORS)
    config = {"peft_type": "LORA", "r": spec.rank, "lora_alpha": spec.alpha, "base_model_name_or_path": str(model)}
    targets = "all-linear" if "all-linear" in spec.targets else list(spec.targets)
    (directory / CONFIG).write_text(json.dumps(config | {"target_modules": targets} | changes))
    return directory


def lora_context(model: Path, spec: LoraSpec = SPEC, **options: Any) -> TrainerContext:
    return evolve(make_context(model, **{"optimizer": OPTIMIZER} | options), lora=spec)


def saved_adapters(backend: Any, directory: Path) -> dict[str, Tensor]:
    """What a trainer of one rank writes for PEFT."""
    directory.mkdir()
    backend.save_state(SaveStateRequest(directory=directory, kind="peft"))
    return load_file(directory / TENSORS)


def assert_adapters(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], most: float = 1e-6) -> None:
    """The same names, and no element of a parameter further off."""
    assert found.keys() == expected.keys()
    errors = {name: float((found[name].double() - tensor.double()).abs().max()) for name, tensor in expected.items()}
    wrong = {name: error for name, error in errors.items() if not error <= most}
    assert not wrong, f"adapters are off by {wrong}; expected at most {most}"
