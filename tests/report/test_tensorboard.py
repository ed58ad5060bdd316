"""The sink `tensorboard`, with the package that it writes by."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlcore.spi import SinkContext, StorageError
from rlcore_report.tensorboard import TensorBoardConfig, TensorBoardSink


def test_a_metric_is_a_scalar_at_its_step(tmp_path: Path) -> None:
    sink = TensorBoardSink(SinkContext(run_directory=tmp_path, run_name="run", recipe=""), TensorBoardConfig())
    for step, loss in ((1, 0.5), (2, 0.25)):
        sink.log(step, {"loss": loss})
    sink.log_evaluation(1, {"checkpoint_eval/accuracy": 0.75})
    sink.close(None)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("loss")] == [(1, 0.5), (2, 0.25)]
    assert [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors("checkpoint_eval/accuracy")] == [
        (1, 0.75)
    ]


def test_steps_may_have_the_names_of_another_library(tmp_path: Path) -> None:
    context = SinkContext(run_directory=tmp_path, run_name="run", recipe="")
    sink = TensorBoardSink(context, TensorBoardConfig(names_as="wandb"))
    sink.log(1, {"reward_mean": 0.5, "kl": 0.25})
    sink.log_evaluation(1, {"checkpoint_eval/accuracy": 0.75})
    sink.close(None)
    tags = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["tensors"]
    assert tags == ["train/reward", "rlcore/kl", "checkpoint_eval/accuracy"]


def test_a_folder_that_cannot_be_made_is_no_defect(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(StorageError) as raised:
        TensorBoardSink(SinkContext(run_directory=tmp_path, run_name="run", recipe=""), TensorBoardConfig())
    assert str(tmp_path) in str(raised.value)
