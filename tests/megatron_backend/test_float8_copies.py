"""Copies of weights in 8 bits, freed. TransformerEngine makes them on a GPU alone: test_train_float8_gpu has them."""

import torch

from rlcore_megatron.modules.token_dispatch import drop_float8_copies


class Multiplies(torch.nn.Linear):
    """Keeps copies where TransformerEngine's modules do."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self._fp8_workspaces = {"weight": torch.zeros(2, 2, dtype=torch.uint8)}


def test_every_modules_copies_are_freed_and_nothing_else() -> None:
    models = [torch.nn.Sequential(Multiplies(), torch.nn.LayerNorm(2)), torch.nn.Sequential(torch.nn.Sequential(Multiplies()))]
    weights = [parameter.clone() for model in models for parameter in model.parameters()]
    drop_float8_copies(models)
    kept = [module._fp8_workspaces for model in models for module in model.modules() if isinstance(module, Multiplies)]
    assert kept == [{}, {}]
    for parameter, weight in zip((each for model in models for each in model.parameters()), weights, strict=True):
        assert torch.equal(parameter, weight)
    drop_float8_copies(models)
