"""Notes on keys of `[schedule]` that have no effect in a run of its length."""

from collections.abc import Iterator

from rlcore.run.plan.run_plan import RunPlan
from rlcore.spi import Note


def schedule_notes(plan: RunPlan) -> Iterator[Note]:
    """A warm-up that does not end, and a decay that does not begin. None where the trainer's plugin has said what it does with
    `[schedule]`: the rate's course is its own then.
    """
    if any(note.startswith("schedule: ") for note in plan.notes):
        return
    schedule, num_updates = plan.recipe.schedule, plan.num_train_steps
    warmup, decays = schedule.warmup_steps, schedule.decay != "constant"
    run = f"the run makes {num_updates} optimizer steps (run.num_steps · training.minibatches_per_step)"
    if plan.critic_warmup_steps:
        run = f"{run[:-1]}, less critic.warmup_steps)"
    if warmup > num_updates:
        reached = f"{100 * num_updates / warmup:.3g}% of the learning rate is all that it reaches"
        follows = f", and the {schedule.decay} decay never begins" if decays else ""
        yield Note(path="schedule.warmup_steps", text=f"{warmup}, while {run}: {reached}{follows}")
    elif warmup == num_updates and decays:
        yield Note(path="schedule.decay", text=f'"{schedule.decay}" never begins: the warm-up takes {warmup} steps, and {run}')
