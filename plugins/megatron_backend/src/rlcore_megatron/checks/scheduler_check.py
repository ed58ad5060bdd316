"""Checks of Megatron's own schedule of the learning rate: its values against each other, and the run's length."""

from collections.abc import Iterator

from attrs import frozen

from rlcore.spi import CheckContext, Note, Problem, ScheduleSpec
from rlcore_megatron.layouts.layout_check import SECTION, option_problem
from rlcore_megatron.setup.config import MegatronConfig

OWN_NAMES = {"lr_warmup_steps": "warmup_steps", "lr_decay_style": "decay", "min_lr": "min_learning_rate_ratio"}
"""Megatron's name of each field of `[schedule]`."""


@frozen(kw_only=True)
class Course:
    """The learning rate's course as `[trainer.megatron.scheduler]` has it, with what it takes from the recipe otherwise."""

    warmup: int
    """Optimizer steps until the peak."""
    end: int
    """The optimizer step in which the decay is at its end."""
    annealing: int | None
    """Steps before the end in which a "WSD" decays."""
    first_rate: float
    least_rate: float
    peak: float
    num_steps: int
    """The run's optimizer steps."""

    @classmethod
    def of(cls, context: CheckContext, config: MegatronConfig) -> "Course | None":
        """None where there is no such table, or no training."""
        table, spec, schedule, num_steps = config.scheduler, context.optimizer, context.schedule, context.num_train_steps
        if not table or spec is None or schedule is None or num_steps is None:
            return None
        return cls(
            warmup=table.get("lr_warmup_steps", schedule.warmup_steps),
            end=table.get("lr_decay_steps", num_steps),
            annealing=table.get("wsd_decay_steps") if table.get("lr_decay_style") == "WSD" else None,
            first_rate=table.get("init_lr", 0.0),
            least_rate=table.get("min_lr", spec.learning_rate * schedule.min_learning_rate_ratio),
            peak=spec.learning_rate,
            num_steps=num_steps,
        )


def course_problems(context: CheckContext, config: MegatronConfig) -> Iterator[Problem]:
    """Refuse a table, right for itself, that Megatron would refuse in the first step or would jump over."""
    course, table = Course.of(context, config), config.scheduler
    if course is None:
        return
    if course.warmup >= course.end:
        warms_up = "scheduler.lr_warmup_steps" if "lr_warmup_steps" in table else "scheduler"
        found = f"{course.warmup} steps until the peak" if warms_up == "scheduler" else str(course.warmup)
        whose = "lr_decay_steps" if "lr_decay_steps" in table else "the run's optimizer steps, where its decay ends"
        yield option_problem(warms_up, found, f"less than {whose} = {course.end}", "Or set lr_decay_steps to more")
    elif course.annealing is not None and course.annealing > course.end - course.warmup:
        expected = f"at most {course.end - course.warmup}: it ends in step {course.end}, and the warm-up in {course.warmup}"
        yield option_problem("scheduler.wsd_decay_steps", str(course.annealing), expected)
    for key, rate in (("init_lr", course.first_rate), ("min_lr", course.least_rate)):
        if rate > course.peak:
            yield option_problem(f"scheduler.{key}", str(rate), f"at most optimizer.learning_rate = {course.peak}")


def course_notes(context: CheckContext, config: MegatronConfig) -> Iterator[Note]:
    """A table that stands before the recipe's `[schedule]`, and a warm-up that is longer than the run."""
    course, schedule = Course.of(context, config), context.schedule
    if course is None or schedule is None:
        return
    default = ScheduleSpec()
    if schedule != default:
        given = [own for own, name in OWN_NAMES.items() if getattr(schedule, name) != getattr(default, name)]
        unread = [f"its {own} is read, and no {OWN_NAMES[own]}" for own in given if own in config.scheduler]
        told = ", ".join(unread) or "it takes from here what it does not say itself"
        yield Note(path="schedule", text=f"{SECTION}.scheduler takes its place: {told}")
    if course.warmup > course.num_steps:
        # Megatron's course begins with init_lr itself, in step 0.
        reached = course.first_rate + (course.peak - course.first_rate) * (course.num_steps - 1) / course.warmup
        text = f"{course.warmup}, while the run makes {course.num_steps} optimizer steps: {reached:.3g} is all that it reaches"
        is_own = "lr_warmup_steps" in config.scheduler
        yield Note(path=f"{SECTION}.scheduler.lr_warmup_steps" if is_own else "schedule.warmup_steps", text=text)
