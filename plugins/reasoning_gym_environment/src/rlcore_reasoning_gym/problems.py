"""The rows: problems of several families, each determined by its number."""

import hashlib
import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rlcore.spi import DataError, LazyRows, Row
from rlcore_reasoning_gym.answers import as_response, instruction_of
from rlcore_reasoning_gym.config import ReasoningGymConfig
from rlcore_reasoning_gym.families import Family

MAX_TRIES = 100
"""Problems that are looked at for a row."""


class Problems:
    """The problems of a section of a recipe. Those held out are made once; each other one whenever its row is taken."""

    def __init__(self, config: ReasoningGymConfig) -> None:
        self._config = config
        self._weights = [family.weight for family in config.families.values()]
        self._data_sets: dict[tuple[str, str, int | None], Any] = {}

    def rows(self, split: str) -> Sequence[Row]:
        """The rows of "train" or "evaluation"."""
        if split == "train":
            return LazyRows(self._config.num_train, self._train_row, lambda number: self._family("train", number).level)
        if split == "evaluation":
            return self._evaluation
        raise ValueError(f'found split {split!r}; expected "train" or "evaluation"')

    @cached_property
    def _evaluation(self) -> list[Row]:
        return [self._row("evaluation", number, frozenset()) for number in range(self._config.num_evaluation)]

    @cached_property
    def _held_out(self) -> frozenset[str]:
        return frozenset(row["entry"]["question"] for row in self._evaluation)

    def _train_row(self, number: int) -> Row:
        return self._row("train", number, self._held_out)

    def _row(self, split: str, number: int, excluded: frozenset[str]) -> Row:
        """The problem of that number, or the next one, where it is excluded or the family finds none."""
        family = self._family(split, number)
        data_set, size = self._data_set(family, split), self._num(split)
        failure: Exception | None = None
        for attempt in range(MAX_TRIES):
            try:
                entry = data_set[(number + attempt) % size]
            except Exception as error:  # whatever a family raises whose search comes to nothing
                failure = error
                continue
            if entry["question"] not in excluded:
                return self._row_of(family, entry)
        where = f"environment.reasoning_gym.families.{family.name}"
        if failure is not None:
            said = f"{type(failure).__name__}: {failure}"
            found = f"makes no more problems; change its options or levels ({where}). It says: {said}"
        else:
            found = f"has hardly a problem that is not held out; lower num_evaluation, or give it more problems ({where})"
        raise DataError(f"the family {family.name!r} of reasoning-gym {found}") from failure

    def _row_of(self, family: Family, entry: dict[str, Any]) -> Row:
        row = {"prompt": self._prompt(entry["question"]), "family": family.name, "level": family.level, "entry": entry}
        if entry["answer"] is not None:
            row |= {"answer": entry["answer"], "completion": as_response(entry["answer"], self._config)}
        return row

    def _family(self, split: str, number: int) -> Family:
        """The family of a row, by the weights."""
        draw = random.Random(f"{self._config.problem_seed}/{split}/{number}")
        name = draw.choices(list(self._config.families), self._weights)[0]
        config = self._config.families[name]
        level = draw.choice(config.levels) if config.levels else None
        return Family(name=name, level=level, options=config.options)

    def _data_set(self, family: Family, split: str) -> Any:
        key = (split, family.name, family.level)
        if key not in self._data_sets:
            name = f"{self._config.problem_seed}/{split}/{family.name}/{family.level}"
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) // 2  # numpy takes seeds of 32 bits, index added
            self._data_sets[key] = family.data_set(seed, self._num(split))
        return self._data_sets[key]

    def _num(self, split: str) -> int:
        return self._config.num_train if split == "train" else self._config.num_evaluation

    def _prompt(self, question: str) -> str | list[dict[str, str]]:
        text = f"{question.strip()}\n\n{instruction_of(self._config)}".strip()
        if self._config.prompt_format == "text":
            return text
        system = self._config.system_prompt
        messages = [] if system is None else [{"role": "system", "content": system}]
        return [*messages, {"role": "user", "content": text}]
