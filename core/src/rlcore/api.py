"""Training and evaluation from Python: what `import rlcore` offers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from rlcore.cli.display import open_display
from rlcore.config.data import Split
from rlcore.config.load import Origin
from rlcore.run.evaluate import evaluate as run_evaluation
from rlcore.run.plan.data_sets import rows_of
from rlcore.run.plan.in_process_overrides import InProcessOverrides
from rlcore.run.plan.prepare import prepare, require_device
from rlcore.run.plan.run_plan import RunPlan
from rlcore.run.storage.saved_run import SavedRun as Run
from rlcore.run.train import train as run_training
from rlcore.spi import AgentEnvironment, ConfigError, Environment, Problem, Row

Recipe: TypeAlias = str | Path | Mapping[str, Any]
"""A TOML file, or what one would hold."""
Reward: TypeAlias = Callable[..., Any] | Sequence[Callable[..., Any]]
Dataset: TypeAlias = Sequence[Any] | Mapping[str, Sequence[Any]]
Display: TypeAlias = Literal["auto", "live", "plain", "silent"]


def train(
    recipe: Recipe,
    *overrides: str,
    reward: Reward | None = None,
    environment: Environment | AgentEnvironment | None = None,
    dataset: Dataset | None = None,
    resume: bool = False,
    allow_changes: bool = False,
    progress: Display = "auto",
) -> Run:
    """Train a model, as `rlcore train` does, and return the run.

    `overrides` are texts such as "training.prompts_per_step=8". What follows replaces what the recipe says of it:

    - `reward`: a function of (prompt, completion, row) or several, called in this process; see docs/rewards.md.
    - `environment`: an object with `reset` and `step`, or with `run`, as rlcore.spi.Environment and AgentEnvironment say.
    - `dataset`: rows to train on, a sequence of mappings or a data set of the package `datasets`; or a mapping with "train" and
      "evaluation" of such.

    `resume` continues the run from its newest checkpoint; `allow_changes` also where the recipe makes another run of it.
    `progress` is how to show what happens. Raises RlcoreError with all that is wrong; Ctrl-C saves a checkpoint, then raises
    InterruptedRun. Nothing that the run has started is left when this returns or raises, but for a thread
    of a function of yours that hangs where Python cannot end it: in a system call, or in a library that is no Python.
    """
    require_words(overrides, progress=(progress, get_args(Display)))
    given = _given(reward, environment, dataset, ("train",))
    plan = _plan(recipe, overrides, given, evaluating=False, continues=resume)
    with open_display(progress, {}) as shown:
        summary = run_training(plan, resume=resume, allow_changes=allow_changes, progress=shown)
    return Run(Path(str(summary["run_directory"])))


def evaluate(
    recipe: Recipe,
    *overrides: str,
    reward: Reward | None = None,
    environment: Environment | AgentEnvironment | None = None,
    dataset: Dataset | None = None,
    checkpoint: str | Path | None = None,
    progress: Display = "auto",
) -> dict[str, float]:
    """Measure a model on held-out rows, as `rlcore eval` does, and return the figures.

    `dataset` are the held-out rows, or a mapping as in `train`, for a recipe whose rows to train on are needed too, such as
    demonstrations; `checkpoint` is one of a run, in place of the recipe's model.
    Everything else is as in `train`.
    """
    require_words(overrides, progress=(progress, get_args(Display)))
    # Whoever measures alone need not have rows to train on: the same ones stand there.
    given = _given(reward, environment, dataset, ("train", "evaluation"))
    plan = _plan(recipe, overrides, given, evaluating=True, continues=checkpoint is not None)
    with open_display(progress, {}) as shown:
        return run_evaluation(plan, checkpoint=None if checkpoint is None else Path(checkpoint), progress=shown)


def load(run_directory: str | Path) -> Run:
    """Open a run's directory: `metrics`, `samples`, `checkpoints`, `model` and more. CheckpointError where there is no run."""
    return Run.find(run_directory)


def rows(recipe: Recipe, *overrides: str, split: Split = "train") -> Sequence[Row]:
    """The rows that a run of a recipe reads: those of its environment, or its data."""
    require_words(overrides, split=(split, get_args(Split)))
    return rows_of(prepare(as_recipe(recipe), overrides), split)


def _plan(recipe: Recipe, overrides: Sequence[str], given: InProcessOverrides, *, evaluating: bool, continues: bool) -> RunPlan:
    plan = prepare(as_recipe(recipe), overrides, evaluating=evaluating, continues=continues, given=given)
    require_device(plan)
    return plan


def require_words(overrides: Sequence[object], **words: tuple[object, Sequence[str]]) -> None:
    """ConfigError where an override is no text, or an argument none of the words that it may be."""
    problems = [
        Problem(path="overrides", found=f"a {type(one).__name__}", expected='texts such as "training.prompts_per_step=8"')
        for one in overrides
        if not isinstance(one, str)
    ]
    problems += [
        Problem(path=name, found=f"{found!r:.60}", expected=f"any of {', '.join(known)}")
        for name, (found, known) in words.items()
        if found not in known
    ]
    if problems:
        raise ConfigError(problems)


def as_recipe(recipe: Recipe) -> Path | Mapping[str, Any]:
    """The file, or the mapping as TOML would hold it; ConfigError where it is neither."""
    if isinstance(recipe, Mapping):
        if wrong := list(_odd_keys(recipe, "recipe")):
            raise ConfigError(wrong)
        plain: dict[str, Any] = _plain(recipe)
        return plain
    if not isinstance(recipe, str | Path):
        expected = "a TOML file, or a mapping of what one would hold"
        raise ConfigError([Problem(path="recipe", found=f"a {type(recipe).__name__}", expected=expected)])
    return Path(recipe)


def _odd_keys(value: Any, where: str) -> Iterator[Problem]:
    """The keys that are no texts, which TOML has not."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _odd_keys(item, f"{where}.{key}")
            else:
                yield Problem(path=where, found=f"the key {key!r} (a {type(key).__name__})", expected="keys that are texts")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _odd_keys(item, f"{where}[{number}]")


def _plain(value: Any) -> Any:
    """Return the value that TOML holds for a value of Python."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _given(
    reward: Reward | None, environment: Environment | AgentEnvironment | None, dataset: Dataset | None, names: Sequence[Split]
) -> InProcessOverrides:
    functions = () if reward is None else tuple(reward) if isinstance(reward, Sequence) else (reward,)
    rows = {} if dataset is None else dataset if isinstance(dataset, Mapping) else dict.fromkeys(names, dataset)
    splits = get_args(Split)
    problems = [
        Problem(path="reward", found=f"a {type(function).__name__}", expected="a function, or a sequence of functions")
        for function in functions
        if not callable(function)
    ]
    if reward is not None and not functions:
        problems.append(Problem(path="reward", found="no function", expected="one at least"))
    problems += [
        Problem(path="dataset", found=f"the key {name!r}", expected=f"any of {', '.join(splits)}")
        for name in rows
        if name not in splits
    ]
    if isinstance(environment, type):
        remedy = "Build it first, or name it in an entry point"
        found = f"the class {environment.__name__}"
        problems.append(Problem(path="environment", found=found, expected="an object of it", remedy=remedy))
    if problems:
        raise ConfigError(problems)
    known = {name: rows[name] for name in splits if name in rows}
    origin = Origin(label="the call of rlcore", directory=Path.cwd())
    return InProcessOverrides(reward=functions, environment=environment, rows=known, origin=origin)
