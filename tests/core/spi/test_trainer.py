"""A step's place in the schedule."""

from rlcore.spi import GlobalCounts, LossSpec, TrainStepRequest


def test_without_a_place_of_its_own_a_step_is_where_the_weights_are():
    options = {
        "microbatches": (),
        "counts": GlobalCounts(num_loss_tokens=1, num_loss_sequences=1),
        "loss": LossSpec(path="m:f", config=None),
        "temperature": 1.0,
        "weight_version": 3,
    }
    assert TrainStepRequest(**options).schedule_step == 3
    assert TrainStepRequest(**options, schedule_step=5).schedule_step == 5
