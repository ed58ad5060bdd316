"""Forms of multi-latent attention beside that of test_layout's table, against plain transformers in one process."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from attrs import evolve
from decoder_families import YARN
from megatron_families import make_own
from megatron_support import (
    OPTIMIZER,
    TEMPERATURE,
    WEIGHTED,
    GradientsSeen,
    Reference,
    in_files,
    make_backend,
    make_batch,
    reference_backward,
    step_request,
)

from rlcore.spi import (
    ROUTED_EXPERTS,
    CheckContext,
    CloseRequest,
    LogprobsRequest,
    LossSpec,
    ModelSpec,
    NonFiniteError,
    SaveStateRequest,
)
from rlcore_megatron.checks.check import check
from rlcore_megatron.setup.config import MegatronConfig
from rlcore_torchkit.huggingface.models import any_decoder_problems

VARIANTS = {
    "queries from hidden states": {"q_lora_rank": None, "rope_parameters": None},
    "one group": {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-3},
    "no mscale": {"rope_parameters": dict(YARN)},
    "all groups": {"topk_group": 4, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
}
BOUND = 1e-5


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_log_probabilities_and_gradients_are_those_of_transformers(tmp_path: Path, options: dict[str, object]) -> None:
    """Before a step, and after it of what it exports."""
    directory, batch = make_own(tmp_path / "model", "deepseek_v3", num_hidden_layers=2, **options), make_batch(seed=1)
    reference = Reference(directory, OPTIMIZER)
    with torch.no_grad():
        expected, _ = reference.logprobs(batch)
    backend = make_backend(directory)
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    np.testing.assert_allclose(np.concatenate(backend.get_logprobs(request).logprobs), expected.numpy(), atol=BOUND)
    seen = GradientsSeen(backend)
    backend.train_step(step_request((batch,), batch.counts(), 0, WEIGHTED))
    reference_backward(reference, batch, WEIGHTED)
    gradients = in_files(reference.model, reference.gradients())
    assert seen.tensors.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(seen.tensors[name], gradient, atol=BOUND, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    (tmp_path / "saved").mkdir()
    backend.save_state(SaveStateRequest(directory=tmp_path / "saved", kind="hf"))
    written = make_batch(seed=2)
    request = evolve(request, microbatches=(written,), weight_version=1)
    with torch.no_grad():
        expected, _ = Reference(tmp_path / "saved", OPTIMIZER).logprobs(written)
    np.testing.assert_allclose(np.concatenate(backend.get_logprobs(request).logprobs), expected.numpy(), atol=BOUND)
    backend.close(CloseRequest())


KIMI = {
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, "factor": 32.0, "original_max_position_embeddings": 16}
    | {"beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
}
"""Kimi-K2's sizes that are no widths, by its config.json on the Hub."""
OF_THE_HUB = {
    "model_type": "kimi_k2",
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
}


def test_kimi_k2_is_refused_by_its_name_and_computed_by_that_of_its_architecture(tmp_path: Path) -> None:
    directory, batch = make_own(tmp_path / "model", "deepseek_v3", num_hidden_layers=2, **KIMI), make_batch(seed=1)
    file = directory / "config.json"
    named = file.read_text()
    file.write_text(json.dumps({**json.loads(named), **OF_THE_HUB}))
    context = CheckContext(model=ModelSpec(path=str(directory)), device="cpu", world_size=1, max_sequence_length=64)
    for problems in (check(context, MegatronConfig()), any_decoder_problems(context.model)):
        (problem,) = problems
        assert (problem.path, problem.found.partition(",")[0]) == (str(file), "model_type kimi_k2")
        assert problem.remedy == 'Set "model_type" to "deepseek_v3" in a local config.json, and remove its auto_map'
    content = {**json.loads(file.read_text()), "model_type": "deepseek_v3"}
    del content["auto_map"]
    file.write_text(json.dumps(content))
    with torch.no_grad():
        expected, _ = Reference(directory, OPTIMIZER).logprobs(batch)
    backend = make_backend(directory)
    request = LogprobsRequest(microbatches=(batch,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    np.testing.assert_allclose(np.concatenate(backend.get_logprobs(request).logprobs), expected.numpy(), atol=BOUND)
    backend.close(CloseRequest())


def test_a_loss_that_is_nan_is_told_where_routers_have_biases_that_do_not_train(tmp_path: Path) -> None:
    backend, batch = make_backend(make_own(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)), make_batch(seed=1)
    loss = LossSpec(path="fsdp2_support:nan_loss", config=-1e9, token_columns=("advantages",))
    with pytest.raises(NonFiniteError, match="loss is nan"):
        backend.train_step(step_request((batch,), batch.counts(), 0, loss))
    backend.close(CloseRequest())


def test_wide_projections_can_be_computed_again(tmp_path: Path) -> None:
    """Instead of being kept, the step has the same gradients."""
    directory, batch = make_own(tmp_path / "model", "deepseek_v3", num_hidden_layers=2), make_batch(seed=1)
    found = []
    for options in ({}, {"recompute": "selective", "transformer": {"recompute_modules": ["mla_up_proj"]}}):
        backend = make_backend(directory, config=MegatronConfig(**options))
        seen = GradientsSeen(backend)
        backend.train_step(step_request((batch,), batch.counts(), 0, WEIGHTED))
        found.append(seen.tensors)
        backend.close(CloseRequest())
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=0.0, rtol=0.0, msg=lambda text, n=name: f"{n}: {text}")


def test_replayed_routing_is_weighed_by_scores_alone(tmp_path: Path) -> None:
    """Tokens go where they are told, across groups too, and an expert's share is its score's among the chosen ones, scaled."""
    directory, batch = make_own(tmp_path / "model", "deepseek_v3", num_hidden_layers=2), make_batch(seed=1)
    random = np.random.default_rng(0)
    experts = random.random((batch.num_tokens, 2, 8)).argsort(-1)[..., :4].astype(np.int16)
    experts[:, 0] = -1  # an MLP
    backend = make_backend(directory)
    routed = batch.with_token_column(ROUTED_EXPERTS, experts)
    request = LogprobsRequest(microbatches=(routed,), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=0)
    (found,) = backend.get_logprobs(request).logprobs
    backend.close(CloseRequest())
    reference, places = Reference(directory, OPTIMIZER), iter(np.split(experts[:, 1], batch.offsets[1:-1]))

    def replace(_: object, __: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        chosen = torch.from_numpy(next(places)).long()
        scores = output[0].sigmoid().gather(1, chosen)
        return output[0], 2.5 * scores / scores.sum(1, keepdim=True), chosen

    reference.model.model.layers[1].mlp.gate.register_forward_hook(replace)
    with torch.no_grad():
        expected, _ = reference.logprobs(batch)
    np.testing.assert_allclose(found, expected.numpy(), atol=BOUND)
