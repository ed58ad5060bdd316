"""Options beside which the trainer does not compute by batch-invariant kernels, each with its key."""

from attrs import evolve

from rlcore.spi import LoraSpec, ModelSpec
from rlcore_fsdp2.check import check
from rlcore_fsdp2.config import Fsdp2Config
from rlcore_fsdp2.provider import shared_kernels as fsdp2_kernels
from rlcore_torchkit.huggingface import batch_invariance
from rlcore_vllm.provider import shared_kernels as vllm_kernels
from rlcore_vllm.setup.config import VllmConfig

OPTION = "trainer.fsdp2.batch_invariant"


def problems(context, **options):
    return [(one.path, one.found) for one in check(context, Fsdp2Config(batch_invariant=True, **options))]


def test_what_they_are_for(invariant_context):
    assert problems(invariant_context) == problems(invariant_context, activation_checkpointing=True) == []


def test_without_the_option_nothing_is_asked(invariant_context, monkeypatch):
    monkeypatch.setattr(batch_invariance, "installed_version", lambda name: None)
    assert problems(invariant_context) == [(OPTION, "true, without vLLM for CUDA")]
    assert list(check(invariant_context, Fsdp2Config())) == []


def test_other_options(invariant_context):
    found = problems(
        evolve(invariant_context, world_size=8, lora=LoraSpec()),
        tensor_parallel=2,
        context_parallel=2,
        fp8=True,
        compile_layers=True,
    )
    asked = {(path, text) for path, text in found if "batch_invariant" in text or path == OPTION}
    assert asked == {
        ("trainer.fsdp2.tensor_parallel", "2, with batch_invariant"),
        ("trainer.fsdp2.context_parallel", "2, with batch_invariant"),
        ("trainer.fsdp2.fp8", "true, with batch_invariant"),
        ("trainer.fsdp2.compile_layers", "true, with batch_invariant"),
        (OPTION, "true, with [lora]"),
    }


def test_parts(invariant_context):
    assert problems(invariant_context, batch_invariant_parts=2) == []
    assert problems(invariant_context, batch_invariant_parts=3) == [
        ("trainer.fsdp2.batch_invariant_parts", "3, for num_attention_heads = 4"),
        ("trainer.fsdp2.batch_invariant_parts", "3, for intermediate_size = 512"),
    ]
    ((path, text),) = [(one.path, one.found) for one in check(invariant_context, Fsdp2Config(batch_invariant_parts=2))]
    assert (path, text) == ("trainer.fsdp2.batch_invariant_parts", "2, without batch_invariant")


def test_a_generator_of_as_many_ranks_has_the_same_kernels():
    for parts in (1, 2, 4):
        ours = fsdp2_kernels(Fsdp2Config(batch_invariant=True, batch_invariant_parts=parts))
        theirs = [vllm_kernels(VllmConfig(batch_invariant=True, tensor_parallel=ranks)) for ranks in (1, 2, 4)]
        assert [ours == name for name in theirs] == [parts == ranks for ranks in (1, 2, 4)]


def test_the_reference_too_is_of_the_family(invariant_context, model_directory):
    other = ModelSpec(path=str(model_directory("llama")), dtype="bfloat16")
    assert problems(evolve(invariant_context, reference=other, needs_reference=True)) == [
        (OPTION, "true, for model_type llama")
    ]
    assert problems(evolve(invariant_context, reference=invariant_context.model, needs_reference=True)) == []
