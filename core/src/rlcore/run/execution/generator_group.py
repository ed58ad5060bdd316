"""The generator of a run in one process: requests in, tokens and their text out."""

from attrs import frozen

from rlcore.registry.generator_handle import GeneratorHandle
from rlcore.run.data.tokenizer import Tokenizer
from rlcore.run.execution.in_process_group import InProcessGroup
from rlcore.run.protocols import Responses
from rlcore.spi import GenerateRequest


@frozen(kw_only=True, eq=False)
class InProcessGenerator(InProcessGroup[GeneratorHandle]):
    """One generator in the driver's own process."""

    tokenizer: Tokenizer

    def generate(self, request: GenerateRequest) -> Responses:
        """Sample responses."""
        return Responses.of(self.handle.generate(request), self.tokenizer)
