"""The functions that trainers' hooks share, without a trainer."""

from pathlib import Path

import pytest

from rlcore.spi import CheckpointError, ContractError, LogprobsRequest, ModelSpec, RankInfo, SaveStateRequest, TrainerContext
from rlcore_torchkit.trainer.trainer_hooks import check_same_shapes, requested_model, save_state


def logprobs_of(model: str) -> LogprobsRequest:
    return LogprobsRequest(microbatches=(), model=model, temperature=1.0, entropy=False, weight_version=0)


def test_the_model_that_a_request_names_is_found_or_refused() -> None:
    assert requested_model(logprobs_of("policy"), "policy", None) == "policy"
    assert requested_model(logprobs_of("reference"), "policy", "reference") == "reference"
    with pytest.raises(ContractError, match="needs_reference"):
        requested_model(logprobs_of("reference"), "policy", None)


def test_a_checkpoint_to_resume_from_is_written_by_the_trainer_itself(tmp_path: Path) -> None:
    context = TrainerContext(
        model=ModelSpec(path="nowhere"),
        rank_info=RankInfo(),
        seed=0,
        num_train_steps=1,
        needs_reference=False,
        max_sequence_length=8,
    )
    written = []

    def resume(directory: Path) -> tuple[str, ...]:
        written.append(directory)
        return ("part",)

    def export(_: object) -> None:
        pytest.fail("a checkpoint to resume from needs no export")

    request = SaveStateRequest(directory=tmp_path, kind="resume")
    assert save_state(request, context, 3, resume=resume, export=export).files == ("part",)
    assert written == [tmp_path]


def test_checkpoints_of_other_shapes_name_what_differs(tmp_path: Path) -> None:
    ours = {"norm": (4,), "head": (8, 4), "bias": (8,)}
    check_same_shapes(tmp_path, ours, dict(ours))
    with pytest.raises(CheckpointError) as raised:
        check_same_shapes(tmp_path, {"norm": (4,), "head": (9, 4), "router": (2, 4)}, ours)
    message = str(raised.value)
    for line in ("bias: absent there, [8] here", "head: [9, 4] there, [8, 4] here", "router: [2, 4] there, absent here"):
        assert line in message
    assert "norm" not in message
