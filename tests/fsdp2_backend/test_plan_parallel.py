"""Tensor ranks of families that no description is for, against one process; what each does is in fsdp2_plan_cases."""

from pathlib import Path

import pytest
import torch
from decoder_families import TRAINED, UNDIVIDED, make_family
from fsdp2_decoder_cases import WORLD_SIZE
from fsdp2_plan_cases import ADAPTED, cases, run_all, with_adapters
from rank_launch import collected, launch_rows

from rlcore.spi import ModelSpec
from rlcore_fsdp2.plan_parallel import plan_problems
from rlcore_torchkit.huggingface.models import load_model

GRADIENTS = ("gemma2", "phi3", "glm4_moe")
"""Families of soft caps, of gathered outputs, and of experts."""
KEPT = [name for name in cases(0, Path(), Path()) if not name.endswith("/gradients") or name.startswith(GRADIENTS)]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong on each of the two ranks; they are launched once."""
    root = tmp_path_factory.mktemp("plans")
    names = {case["name"] for case in collected(request, "test_two_ranks")}
    families = {name.partition("/")[0] for name in names}
    for family in families:
        make_family(root / "models" / family, family, TRAINED[family])
    (root / "scratch").mkdir()
    for family in families.intersection(ADAPTED):
        torch.save(with_adapters(root / "models" / family), root / "scratch" / f"{family}-adapters.pt")
    files = [root / "scratch" / f"results-{rank}.json" for rank in range(WORLD_SIZE)]
    return launch_rows(run_all, (root / "models", root / "scratch", names), files)


@pytest.mark.wide(keep=KEPT)
@pytest.mark.parametrize("name", cases(0, Path(), Path()))
def test_two_ranks(name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())


def problems_of(directory: Path, size: int) -> list[str]:
    model = load_model(ModelSpec(path=str(directory)), dtype=torch.float32, device="meta", any_decoder=True)
    return [str(problem) for problem in plan_problems(model, size)]


@pytest.mark.parametrize("family", UNDIVIDED)
def test_families_without_a_plan_are_refused(family, tmp_path):
    (text,) = problems_of(make_family(tmp_path, family, TRAINED[family]), 2)
    assert "base_model_tp_plan" in text


def test_what_does_not_divide_is_refused_at_once(tmp_path):
    texts = problems_of(make_family(tmp_path / "smollm3", "smollm3", TRAINED["smollm3"]), 3)
    assert len(texts) == 9
    for what in ("num_attention_heads = 4", "num_key_value_heads = 2", "64 out_features of model.layers.*.mlp.gate_proj"):
        assert any(f"tensor_parallel: found 3 for {what}; expected a divisor" in text for text in texts), what
    texts = problems_of(make_family(tmp_path / "glm4_moe", "glm4_moe", TRAINED["glm4_moe"]), 8)
    assert any("4 num_experts of model.layers.*.mlp.experts" in text for text in texts)


def test_parameters_that_a_plan_leaves_out_are_refused(tmp_path):
    """Norms over all heads together, of which a rank has some."""
    directory = make_family(tmp_path, "cohere", {"use_qk_norm": True})
    texts = problems_of(directory, 2)
    assert [text.partition("; ")[0] for text in texts] == [
        f"trainer.fsdp2.tensor_parallel: found 2 for model.layers.*.self_attn.{name}, "
        "which the plan of CohereForCausalLM leaves out"
        for name in ("q_norm", "k_norm")
    ]
