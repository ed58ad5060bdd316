"""What generators answer, as tokens and as text."""

from collections.abc import Sequence
from itertools import pairwise

from attrs import frozen

from rlcore.run.data.tokenizer import Tokenizer
from rlcore.spi import FinishReason, GenerateResult, Turn
from rlcore.spi.arrays import Int64Array

_REASONS = {int(reason): reason for reason in FinishReason}


@frozen(kw_only=True, eq=False)
class Responses:
    """S samples. Their text is made where they are generated: for the driver alone it would be the longest part of a step."""

    result: GenerateResult
    texts: Sequence[str]
    """[S]: decoded, without special tokens."""

    @classmethod
    def of(cls, result: GenerateResult, tokenizer: Tokenizer) -> "Responses":
        """With the text of each sample."""
        bounds = result.offsets.tolist()
        tokens = [result.tokens[start:end] for start, end in pairwise(bounds)]
        return cls(result=result, texts=tokenizer.decode_batch(tokens))

    def turns(self, samples: Int64Array) -> list[Turn]:
        """Of some samples."""
        result, texts = self.result, self.texts
        tokens = result.tokens.view()
        tokens.flags.writeable = False  # they are what will be trained on, whatever an environment does with its turn
        starts, ends = result.offsets[samples].tolist(), result.offsets[samples + 1].tolist()
        reasons = result.finish_reasons[samples].tolist()
        return [
            Turn(text=texts[sample], tokens=tokens[start:end], finish_reason=_REASONS[reason])
            for sample, start, end, reason in zip(samples.tolist(), starts, ends, reasons, strict=True)
        ]
