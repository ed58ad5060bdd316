"""Adapters in every layout against plain transformers in float64, and against PEFT where it is installed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from fsdp2_lora_cases import DROPOUT, LAYOUTS, backend_of, run_all, train, trained
from fsdp2_support import TEMPERATURE, exported, make_config, step_request
from lora_cases import ARCHITECTURES, SAVE_AFTER, assert_reference_is_the_beginning, cases, prepare, results_of
from lora_support import (
    BATCHES,
    EAGER,
    NUM_STEPS,
    OPTIMIZER,
    SPEC,
    LoraReference,
    assert_adapters,
    linear_names,
    lora_context,
    saved_adapters,
)
from rank_launch import collected
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rlcore.spi import (
    CheckpointError,
    CloseRequest,
    ConfigError,
    ContractError,
    LoadStateRequest,
    LogprobsRequest,
    SaveStateRequest,
    UseAdapterRequest,
)
from rlcore_fsdp2.backend import Fsdp2Backend

from ..tiers import each_part

RESUMED = {"dp2/qwen3", "tp2+sp/qwen3"}
"""Layouts whose checkpoints one process resumes."""
KEPT = {*each_part([name for num_ranks, name in cases(LAYOUTS) if num_ranks < 4]), *RESUMED}
"""Each layout of fewer than four ranks and each family once."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    prepare(root)
    dropping = trained(root, "qwen3", dropout=DROPOUT)
    save_file(saved_adapters(dropping, root / "dropping"), root / "qwen3-dropout.safetensors")
    dropping.close(CloseRequest())
    return root


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, root: Path) -> Callable[[int], list[dict[str, str]]]:
    """Launch a number of ranks once for the cases of this session. Return each rank's failures."""
    names = {case["name"] for case in collected(request, "test_layouts_equal_plain_transformers")} | RESUMED
    return results_of(root, run_all, names)


@pytest.mark.wide(keep=[f"{number}-{name}" for number, name in cases(LAYOUTS) if name in KEPT])
@pytest.mark.parametrize(("num_ranks", "name"), cases(LAYOUTS))
def test_layouts_equal_plain_transformers(num_ranks, name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results(num_ranks)) if result[name]}
    assert found == {}, "\n".join(found.values())


@pytest.mark.parametrize("layout", ["tp2+sp", "dp2"])
def test_one_process_resumes_a_layout(layout, root, results, tmp_path):
    assert not results(2)[0][f"{layout}/qwen3"]
    backend = backend_of(root, "qwen3", init_from=None)
    directory = root / f"{layout}-qwen3" / "resume"
    assert backend.load_state(LoadStateRequest(directory=directory)).weight_version == SAVE_AFTER
    train(backend, SAVE_AFTER)
    assert_adapters(saved_adapters(backend, tmp_path / "peft"), load_file(root / "qwen3.safetensors"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_process_equals_plain_transformers(name, root, tmp_path):
    backend = trained(root, name, make_config(activation_checkpointing=name == "qwen2"))
    assert_adapters(saved_adapters(backend, tmp_path / "peft"), load_file(root / f"{name}.safetensors"))
    merged, model = load_file(root / f"{name}-merged.safetensors"), root / "models" / name
    weights, base = exported(backend, NUM_STEPS), load_file(model / "model.safetensors")
    assert_adapters({key: weights[key] for key in merged}, merged)
    assert weights.keys() == base.keys()
    assert all(torch.equal(weights[key], base[key]) for key in base.keys() - merged.keys()), "frozen weights have moved"


def test_peft_trains_the_same(root, tmp_path):
    """PEFT itself loads the adapters, trains them to the same ones, and merges them to the same weights."""
    peft = pytest.importorskip("peft")
    backend = backend_of(root, "qwen3")
    saved_adapters(backend, tmp_path / "first")
    reference = LoraReference(root / "models" / "qwen3", tmp_path / "first")
    base = AutoModelForCausalLM.from_pretrained(root / "models" / "qwen3", dtype=torch.float32, **EAGER)
    reference.model = peft.PeftModel.from_pretrained(base, tmp_path / "first", is_trainable=True)
    parameters = [parameter for parameter in reference.model.parameters() if parameter.requires_grad]
    reference.optimizer = torch.optim.AdamW(
        parameters, lr=OPTIMIZER.learning_rate, weight_decay=OPTIMIZER.weight_decay, eps=OPTIMIZER.eps
    )
    for batch in BATCHES:
        reference.step(batch)
    train(backend)
    assert_adapters(saved_adapters(backend, tmp_path / "last"), peft.get_peft_model_state_dict(reference.model))
    weights, merged = exported(backend, NUM_STEPS), reference.model.merge_and_unload().state_dict()
    assert_adapters(weights, {name: merged[name] for name in weights})


def test_first_values_are_pefts(root, tmp_path):
    """A uniform in ±1/√in, B zero, for every linear layer but the head; another seed has other values."""
    backend = backend_of(root, "qwen3", init_from=None)
    found = saved_adapters(backend, tmp_path / "peft")
    shapes = linear_names(root / "models" / "qwen3")
    assert len(found) == 2 * len(shapes)
    for name, (rows, columns) in shapes.items():
        a, b = (found[f"base_model.model.{name}.lora_{key}.weight"] for key in "AB")
        assert (tuple(a.shape), tuple(b.shape)) == ((SPEC.rank, columns), (rows, SPEC.rank))
        assert 0.9 < float(a.abs().max()) * columns**0.5 <= 1.0
        assert not b.any()
    context = evolve(lora_context(root / "models" / "qwen3"), seed=1)
    other = saved_adapters(Fsdp2Backend(context, make_config()), tmp_path / "other")
    assert all(not torch.equal(found[name], other[name]) for name in found if name.endswith("lora_A.weight"))


def test_new_adapter_begins_with_the_model_alone(root):
    backend = backend_of(root, "qwen3", init_from=None)
    backend.adapters.begun = {}  # as of a checkpoint
    backend.use_adapter(UseAdapterRequest(name="new", seed=1))
    assert backend.adapters.begun is None
    backend.close(CloseRequest())


def test_state_is_of_adapters_alone(root, tmp_path):
    """One thing of weights, a float32 copy of nothing else: checkpoints, moments, and the frozen weights' dtype."""
    backend = trained(root, "qwen3")
    backend.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    saved = load_file(tmp_path / "trainer-00000.safetensors")
    assert {key.partition("/")[0] for key in saved} == {"parameter", "exp_avg", "exp_avg_sq"}
    assert all(key.endswith(("lora_A.weight", "lora_B.weight")) for key in saved)
    narrow = Fsdp2Backend(lora_context(root / "models" / "qwen3", dtype="bfloat16"), make_config())
    dtypes = {(parameter.dtype, parameter.requires_grad) for parameter in narrow.policy.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, True)}
    batch = BATCHES[0]
    narrow.train_step(step_request([batch], batch.counts()))
    assert {spec.dtype for spec in narrow.export_weights(export_request("bfloat16")).specs} == {"bfloat16"}


def export_request(dtype: str):
    from rlcore.spi import ExportWeightsRequest

    return ExportWeightsRequest(weight_version=1, dtype=dtype, max_bucket_bytes=2**20)


def test_resumed_steps_are_exactly_those_that_would_have_followed(root, tmp_path):
    whole, begun = backend_of(root, "qwen3", dropout=DROPOUT), backend_of(root, "qwen3", dropout=DROPOUT)
    train(whole)
    train(begun, 0, SAVE_AFTER)
    directory = tmp_path / "resume"
    directory.mkdir()
    begun.save_state(SaveStateRequest(directory=directory, kind="resume"))
    resumed = backend_of(root, "qwen3", dropout=DROPOUT, init_from=None)
    resumed.load_state(LoadStateRequest(directory=directory))
    assert_reference_is_the_beginning(root, resumed, SAVE_AFTER)
    train(resumed, SAVE_AFTER)
    assert_adapters(saved_adapters(resumed, tmp_path / "a"), saved_adapters(whole, tmp_path / "b"), most=0.0)


def test_recomputed_layers_drop_the_same_inputs(root, tmp_path):
    """Activation checkpointing changes nothing, and what is dropped changes from step to step and layer to layer."""
    plain = trained(root, "qwen3", dropout=DROPOUT)
    again = trained(root, "qwen3", make_config(activation_checkpointing=True), dropout=DROPOUT)
    none = trained(root, "qwen3")
    found = saved_adapters(plain, tmp_path / "plain")
    assert_adapters(saved_adapters(again, tmp_path / "again"), found)
    with pytest.raises(AssertionError):
        assert_adapters(saved_adapters(none, tmp_path / "none"), found, most=1e-4)


def test_log_probabilities_on_request_drop_nothing(root):
    backend = backend_of(root, "qwen3", dropout=DROPOUT)
    train(backend, 0, 1)
    request = LogprobsRequest(
        microbatches=(BATCHES[0],), model="policy", temperature=TEMPERATURE, entropy=False, weight_version=1
    )
    first, second = (backend.get_logprobs(request).logprobs[0] for _ in range(2))
    assert (first == second).all()
    backend.adapters.train_on(BATCHES[0].num_tokens, 0)
    assert (backend.get_logprobs(request).logprobs[0] != first).any()


def test_checkpoint_of_all_weights_is_refused(root, tmp_path):
    whole = Fsdp2Backend(evolve(lora_context(root / "models" / "qwen3"), lora=None), make_config())
    whole.save_state(SaveStateRequest(directory=tmp_path, kind="resume"))
    with pytest.raises(CheckpointError, match="another model"):
        backend_of(root, "qwen3").load_state(LoadStateRequest(directory=tmp_path))


def test_adapters_where_none_are_trained_are_refused(root, tmp_path):
    whole = Fsdp2Backend(evolve(lora_context(root / "models" / "qwen3"), lora=None), make_config())
    with pytest.raises(ContractError, match="without adapters"):
        whole.save_state(SaveStateRequest(directory=tmp_path, kind="peft"))


def test_target_that_is_no_layer_is_refused(root):
    """As `check` does where it can see the model."""
    with pytest.raises(ConfigError, match='"gate_proj"'):
        backend_of(root, "qwen3_moe", targets=("q_proj", "gate_proj"), init_from=None)
