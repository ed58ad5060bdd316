"""The environment `drawn_shapes`: how many circles, or squares, an image shows."""

from collections.abc import Sequence
from typing import Any

from rlcore.spi import DataError, EnvironmentContext, LazyRows, Observation, ResetResult, Row, StepResult, Turn
from rlcore.thoughts import without_thoughts
from rlcore_shapes.config import ShapesConfig
from rlcore_shapes.drawing import draw

STREAMS = {"train": 0, "evaluation": 1}


class ShapesEnvironment:
    """One turn an episode; the response without its thoughts, stripped, must be the number and nothing else."""

    def __init__(self, context: EnvironmentContext, config: ShapesConfig) -> None:  # noqa: ARG002 - drawings have their own seed
        self._config = config

    def rows(self, split: str) -> Sequence[Row]:
        """Drawings of "train" or "evaluation", with the fields prompt, answer and completion."""
        sizes = {"train": self._config.num_train, "evaluation": self._config.num_evaluation}
        return LazyRows(sizes[split], lambda number: self._row(STREAMS[split], number))

    def _row(self, stream: int, number: int) -> Row:
        drawing = draw(self._config, stream, number)
        question = {"type": "text", "text": f"{drawing.kind}s?"}
        content = [{"type": "image", "image": drawing.png}, question]
        answer = str(drawing.count)
        return {"prompt": [{"role": "user", "content": content}], "answer": answer, "completion": answer}

    async def reset(self, row: Row, seed: int) -> ResetResult:  # noqa: ARG002
        """The prompt of a row; its answer is the state."""
        prompt, answer = row.get("prompt"), row.get("answer")
        if not isinstance(prompt, Sequence) or isinstance(prompt, str) or not isinstance(answer, str):
            fields = ", ".join(map(repr, row))
            raise DataError(f"found a row with the fields {fields}; expected a prompt of messages and, as text, its answer")
        return ResetResult(observation=Observation(messages=prompt), state=answer)

    async def step(self, state: Any, turn: Turn) -> StepResult:
        """1.0 for the number, else nothing."""
        is_right = without_thoughts(turn.text, is_thinking=turn.begins_in_thought).strip() == state
        return StepResult(reward=float(is_right), done=True, success=is_right)
