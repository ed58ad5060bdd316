"""Models that transformers alone reads, on two ranks of gloo; what each rank does is in fsdp2_decoder_cases."""

import shutil
from pathlib import Path

import pytest
from decoder_families import TRAINED, make_family
from fsdp2_decoder_cases import WORLD_SIZE, run_all
from rank_launch import launch_rows
from safetensors.torch import load_file, save_file

from rlcore_torchkit.testing.image_models import make_image_model

FAMILIES = ("gemma3_text", "glm4_moe", "gpt_oss", "qwen3_next")
"""One that ties its head, one whose checkpoints hold buffers, one with biases beside its experts, and one that keeps states."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What went wrong on each of the two ranks; they are launched once."""
    root = tmp_path_factory.mktemp("decoders")
    for family in FAMILIES:
        make_family(root / "models" / family, family, TRAINED[family])
    make_image_model(root / "models" / "qwen3_vl", "qwen3_vl")
    broken = Path(shutil.copytree(root / "models" / "gpt_oss", root / "broken"))
    weights = load_file(broken / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (root / "scratch").mkdir()
    return launch_rows(
        run_all,
        (root / "models", broken, root / "scratch"),
        [root / "scratch" / f"results-{rank}.json" for rank in range(WORLD_SIZE)],
    )


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3_vl", "broken"])
def test_two_ranks(name, results):
    found = {f"rank {rank}": result[name] for rank, result in enumerate(results) if result[name]}
    assert found == {}, "\n".join(found.values())
