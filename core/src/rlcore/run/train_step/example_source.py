"""The source of steps that learn from answers of a data set."""

from collections.abc import Callable, Sequence

from attrs import frozen

from rlcore.run.data.examples import Examples, example_batch
from rlcore.run.data.prompt_stream import PromptOrder
from rlcore.run.protocols import Source, always
from rlcore.spi import RolloutBatch
from rlcore.spi.arrays import Int64Array


@frozen(kw_only=True, eq=False)
class ExampleSource(Source):
    """Source of batches from answers of the data set."""

    examples: Examples
    stream: PromptOrder
    names_of: Callable[[Int64Array], Sequence[str]] | None = None
    """The data sets of rows, by their numbers; None where there is only one."""

    def sets_of_examples(self, step: int) -> Sequence[str]:
        """[G]: the data set of each group of a step's examples, where there are several; none otherwise."""
        return () if self.names_of is None else self.names_of(self.examples.rows[self.stream.indices(step - 1)])

    def sample(
        self,
        step: int,
        weight_version: int,  # noqa: ARG002 - no policy is asked
        may_go_on: Callable[[], bool] = always,  # noqa: ARG002 - nothing takes time
    ) -> RolloutBatch:
        """The examples of a step."""
        return example_batch(self.examples, self.stream.indices(step - 1))
