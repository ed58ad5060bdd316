"""The losses that a session knows by name, and those of its callers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, get_args

from attrs import evolve, frozen

from rlcore.config.recipe import Recipe
from rlcore.registry.checks import require_loss
from rlcore.registry.module_source import columns_read, path_problem
from rlcore.schema.structure import structure
from rlcore.schema.suggestions import did_you_mean
from rlcore.spi import PREVIOUS_LOGPROBS, AlgorithmContext, ContractError, LossSpec, Problem, TokenBatch, capabilities
from rlcore.spi.arrays import Float32Array
from rlcore.spi.execution import TrainerGroup
from rlcore_session.errors import CallError, require_none
from rlcore_session.loss_functions import DERIVATIVES, WEIGHTS, NoOptions
from rlcore_torchkit.rl.loss_config import LossConfig, ObjectiveName
from rlcore_torchkit.rl.loss_spec import policy_gradient_spec

Derivatives: TypeAlias = Callable[[list[Float32Array]], Sequence[Any]]
"""A caller's loss: log-probabilities float32 [T] of each sequence to its derivatives by them, [T] of each sequence."""
Loss: TypeAlias = str | LossSpec | Derivatives

CROSS_ENTROPY = "cross_entropy"
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
NAMES = (CROSS_ENTROPY, *OBJECTIVES)
LINEAR = LossSpec(path="rlcore_session.loss_functions:linear", config=NoOptions(), token_columns=(DERIVATIVES,))


@frozen(kw_only=True, eq=False)
class Losses:
    """Makes the LossSpec of a call."""

    recipe: Recipe
    trainer: TrainerGroup

    def spec(self, loss: str | LossSpec, config: Any, batch: TokenBatch) -> LossSpec:
        """The loss with the columns that it reads of the batch. CallError where one is missing, or there is no such loss."""
        columns = batch.token_columns.keys()
        found = self._named(loss, config, columns) if isinstance(loss, str) else self._given(loss, config)
        read = columns_read(found.path)
        missing = sorted({*found.token_columns, *read.token, *read.sequence} - columns - batch.sequence_columns.keys())
        has = ", ".join([*columns, *batch.sequence_columns]) or "none"
        require_none(
            Problem(path="data", found=f"the columns {has}", expected=f"{name!r} too, which the loss {_shown(loss)} reads")
            for name in missing
        )
        return self._with_previous(found, columns)

    def _given(self, loss: LossSpec, config: Any) -> LossSpec:
        if not isinstance(loss, LossSpec):
            raise CallError([_unknown(f"a {type(loss).__name__}")])
        if config is not None:
            raise CallError([_no_config(config, "None: a LossSpec holds its own")])
        return loss

    def _named(self, loss: str, config: Any, columns: Collection[str]) -> LossSpec:
        if ":" in loss:
            if (problem := path_problem(loss) or _import_problem(loss)) is not None:
                expected = "a function that can be imported, as package.module:function"
                raise CallError([Problem(path="loss", found=problem, expected=expected)])
            return LossSpec(path=loss, config=config, token_columns=tuple(sorted(columns)))
        if loss not in NAMES:
            raise CallError([_unknown(repr(loss), did_you_mean(loss, NAMES))])
        if loss == CROSS_ENTROPY:
            if config is not None:
                raise CallError([_no_config(config, f'None: "{CROSS_ENTROPY}" takes no options')])
            path, read = "rlcore_session.loss_functions:cross_entropy", tuple({WEIGHTS} & set(columns))
            return LossSpec(path=path, config=NoOptions(), token_columns=read)
        return policy_gradient_spec(self._options(loss, config, columns))

    def _options(self, objective: str, config: Any, columns: Collection[str]) -> LossConfig:
        """The options of the policy-gradient loss, resolved as those of an algorithm are."""
        if config is None or isinstance(config, Mapping):
            given, options = dict(config or {}), dict[str, Any](objective=objective)
            if "objective" in given:
                raise CallError(
                    [_no_config({"objective": given["objective"]}, "no such key: the loss's name is the objective")]
                )
            config, problems = structure(given | options, LossConfig, "config")
            require_none(problems)
        elif not isinstance(config, LossConfig) or config.objective != objective:
            raise CallError([_no_config(config, f'a mapping, or a LossConfig with objective "{objective}"')])
        options_: LossConfig = config
        if not options_.entropy_coefficient and not self.trainer.has(capabilities.ENTROPY):
            options_ = evolve(options_, entropy_metric="estimate")
        rollout = self.recipe.rollout
        return options_.resolved(
            AlgorithmContext(
                seed=self.recipe.run.seed,
                samples_per_prompt=1,
                minibatches_per_step=1,
                temperature=rollout.temperature,
                generation_logprobs_exact=PREVIOUS_LOGPROBS not in columns,
                max_response_tokens=rollout.max_response_tokens,
            )
        )

    def _with_previous(self, spec: LossSpec, columns: Collection[str]) -> LossSpec:
        """The loss, which gets the log-probabilities at the start of the step: the data's own, or those of this very pass."""
        if spec.previous_logprobs != "absent" or not self.trainer.has(capabilities.PREVIOUS_LOGPROBS):
            return spec
        if PREVIOUS_LOGPROBS not in columns:
            return evolve(spec, previous_logprobs="unchanged")
        names = dict.fromkeys([*spec.token_columns, PREVIOUS_LOGPROBS])
        return evolve(spec, previous_logprobs="given", token_columns=tuple(names))


def _import_problem(path: str) -> str | None:
    """Return the fault of a loss that has a module and cannot be imported; None without one."""
    try:
        require_loss(path)
    except ContractError as error:
        return str(error)
    return None


def _shown(loss: str | LossSpec) -> str:
    return repr(loss if isinstance(loss, str) else loss.path)


def _unknown(found: str, hint: str = "") -> Problem:
    expected = f"any of {', '.join(NAMES)}, a path package.module:function, a LossSpec, or a function"
    return Problem(path="loss", found=f"{found}{hint}", expected=expected)


def _no_config(found: Any, expected: str) -> Problem:
    return Problem(path="config", found=f"{found!r:.80}", expected=expected)
