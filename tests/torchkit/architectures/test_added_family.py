"""The family that docs/plugins.md adds with one file: trainers and generators serve it as they serve ours."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_support
import numpy as np
import pytest
import torch
from fsdp2_support import Reference, assert_same, exported, make_backend, make_batch, make_config, split, step_request
from markdown_blocks import ROOT, blocks
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlcore.spi import CloseRequest, LogprobsRequest, ModelSpec
from rlcore_torchkit.huggingface.models import checkpoint_shapes, load_model
from rlcore_torchkit.testing.models import make_model
from rlcore_transformers.forward import FamilyDecoder

PLUGINS = ROOT / "docs" / "plugins.md"
FAMILY = next(block.text for block in blocks(PLUGINS) if "ARCHITECTURE = Architecture(" in block.text)
ENTRY_POINTS = "[rlcore.architectures]\nlfm2 = acme_lfm2:ARCHITECTURE\n"


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An Lfm2 whose layers all have attention, and norms that are not ones; its family is installed for the test."""
    installed = tmp_path / "site"
    metadata = installed / "acme_lfm2-1.0.dist-info"
    metadata.mkdir(parents=True)
    (installed / "acme_lfm2.py").write_text(FAMILY)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-lfm2\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(installed)
    model = make_model(tmp_path / "model", "lfm2")
    config = AutoConfig.from_pretrained(model, block_auto_adjust_ff_dim=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.08)
    made.save_pretrained(model)
    return model


@pytest.fixture(params=["fsdp2", "fsdp2 sharded", "megatron"])
def trainer(request: pytest.FixtureRequest, directory: Path) -> Iterator[Any]:
    if request.param == "megatron":
        made: Any = megatron_support.make_backend(directory)
    else:
        made = make_backend(directory, config=make_config(cpu_offload=request.param == "fsdp2 sharded"))
    yield made
    made.close(CloseRequest())


def test_a_trainer_computes_and_trains_what_transformers_and_torch_do(trainer: Any, directory: Path, tmp_path: Path) -> None:
    batch, reference = make_batch(), Reference(directory)
    microbatches = split(batch, [[4, 0], [1, 5, 3], [2]])
    request = LogprobsRequest(
        microbatches=microbatches, model="policy", temperature=megatron_support.TEMPERATURE, entropy=False, weight_version=0
    )
    expected = reference.logprobs(batch)[0].detach().numpy()
    order = np.concatenate([np.arange(*batch.offsets[[n, n + 1]]) for n in (4, 0, 1, 5, 3, 2)])
    np.testing.assert_allclose(np.concatenate(trainer.get_logprobs(request).logprobs), expected[order], atol=1e-5)
    result = trainer.train_step(step_request(microbatches, batch.counts()))
    loss, norm = reference.step(batch)
    assert (result.loss, result.grad_norm) == (pytest.approx(loss, abs=1e-5), pytest.approx(norm, rel=1e-5))
    assert_same(exported(trainer, 1), reference.saved(tmp_path))


def test_the_generators_decoder_computes_what_transformers_does(directory: Path) -> None:
    model = load_model(ModelSpec(path=str(directory)), dtype=torch.float32)
    tensors = load_file(directory / "model.safetensors")
    assert checkpoint_shapes(model).keys() == tensors.keys()
    decoder = FamilyDecoder(model.config, model.model.rotary_emb, 16, torch.float32, torch.device("cpu"))
    decoder.bind(tensors)

    def attend(_: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = (states.transpose(0, 1)[None] for states in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1).flatten(1)

    tokens = torch.arange(5, 15)
    found = decoder.logits(decoder.forward(tokens, torch.arange(10), attend))
    torch.testing.assert_close(found, Reference(directory).model(tokens[None]).logits[0], rtol=0.0, atol=1e-5)


def test_a_layer_without_attention_is_refused(directory: Path) -> None:
    from rlcore_torchkit.huggingface.models import architecture_problems

    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_types": ["full_attention", "conv"]}))
    (problem,) = architecture_problems(str(directory))
    assert (problem.path, problem.found) == (str(file), "layers of conv")
