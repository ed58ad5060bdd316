"""Arithmetic problems, numbered: drawing two disjoint sets of them is drawing numbers."""

from collections import Counter
from collections.abc import Sequence
from math import factorial, prod
from typing import Literal, TypeAlias, overload

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi import Row
from rlcore_math.config import ArithmeticConfig

Codes: TypeAlias = NDArray[np.int64]

MAX_SPACE = 2**62
"""Problems are numbered in int64."""


@frozen(kw_only=True)
class ProblemSpace:
    """All problems of one form. A problem's number has its operands, then its operations, as digits of a mixed base."""

    operations: tuple[str, ...]
    num_terms: int
    min_operand: int
    num_operands: int
    """Different values of an operand."""
    num_train: int
    num_evaluation: int
    seed: int

    @classmethod
    def of(cls, config: ArithmeticConfig) -> "ProblemSpace":
        return cls(
            operations=config.operations,
            num_terms=config.num_terms,
            min_operand=config.min_operand,
            num_operands=config.max_operand - config.min_operand + 1,
            num_train=config.num_train,
            num_evaluation=config.num_evaluation,
            seed=config.problem_seed,
        )

    @property
    def size(self) -> int:
        """How many problems there are."""
        return int(self.num_operands**self.num_terms * len(self.operations) ** (self.num_terms - 1))

    def evaluation(self) -> Codes:
        """int64 [num_evaluation]: the problems held out, all different."""
        return self._draw(self.num_evaluation, np.random.default_rng([self.seed, 1]), np.zeros(0, np.int64))

    def train(self) -> Codes:
        """int64 [num_train]: problems to train on, all different; none is held out, or is when operands are exchanged."""
        held_out = np.unique(self.canonical(self.evaluation()))
        return self._draw(self.num_train, np.random.default_rng([self.seed, 0]), held_out)

    def num_left(self) -> int:
        """How many problems there are to train on."""
        return self.size - sum(self._num_exchanges(code) for code in np.unique(self.canonical(self.evaluation())).tolist())

    def canonical(self, codes: Codes) -> Codes:
        """Each problem's number with its operands in order, where their order does not matter to the result."""
        operands, operations = self._digits(codes)
        commutes = [self.operations.index(operation) for operation in ("+", "*") if operation in self.operations]
        any_order = np.isin(operations[:, 0], commutes) & (operations == operations[:, :1]).all(axis=1)
        ordered = np.where(any_order[:, None], np.sort(operands, axis=1), operands)
        numbers = np.zeros(len(codes), np.int64)
        for digit in ordered.T:
            numbers = numbers * self.num_operands + digit
        for digit in operations.T:
            numbers = numbers * len(self.operations) + digit
        return numbers

    def problem(self, code: int) -> tuple[str, int]:
        """A problem's text, such as "37+58=", and its result."""
        operands, operations = (digits[0].tolist() for digits in self._digits(np.asarray([code], np.int64)))
        terms = [self.min_operand + operand for operand in operands]
        text, summands = str(terms[0]), [terms[0]]
        for number, term in zip(operations, terms[1:], strict=True):
            operation = self.operations[number]
            text += f"{operation}{term}"
            if operation == "*":
                summands[-1] *= term
            else:
                summands.append(term if operation == "+" else -term)
        return f"{text}=", sum(summands)

    def _digits(self, codes: Codes) -> tuple[Codes, Codes]:
        """Operands [N, num_terms] less min_operand, and the indices of the operations [N, num_terms - 1]."""
        rest, digits = codes, []
        bases = [len(self.operations)] * (self.num_terms - 1) + [self.num_operands] * self.num_terms
        for base in bases:
            rest, digit = np.divmod(rest, base)
            digits.append(digit)
        stacked = np.stack(digits[::-1], axis=1)
        return stacked[:, : self.num_terms], stacked[:, self.num_terms :]

    def _num_exchanges(self, canonical: int) -> int:
        """Problems with this canonical number."""
        operands, operations = (digits[0].tolist() for digits in self._digits(np.asarray([canonical], np.int64)))
        if len(set(operations)) > 1 or self.operations[operations[0]] == "-":
            return 1
        return factorial(self.num_terms) // prod(factorial(repeats) for repeats in Counter(operands).values())

    def _draw(self, number: int, random: np.random.Generator, excluded: Codes) -> Codes:
        """Different problems whose canonical numbers are not excluded; there must be so many."""
        if self.size <= 4 * number:
            return self._allowed(random.permutation(self.size), excluded)[:number]
        drawn = np.zeros(0, np.int64)
        while len(drawn) < number:
            codes = np.concatenate([drawn, random.integers(self.size, size=2 * number)])
            _, first = np.unique(codes, return_index=True)
            drawn = self._allowed(codes[np.sort(first)], excluded)
        return drawn[:number]

    def _allowed(self, codes: Codes, excluded: Codes) -> Codes:
        return codes[~np.isin(self.canonical(codes), excluded)]


class ProblemRows(Sequence[Row]):
    """Rows with prompt, answer and completion, written out as they are taken."""

    def __init__(self, space: ProblemSpace, codes: Codes, prompt_format: Literal["text", "chat"]) -> None:
        self._space, self._codes, self._format = space, codes, prompt_format

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        if isinstance(index, slice):
            return ProblemRows(self._space, self._codes[index], self._format)
        text, result = self._space.problem(int(self._codes[index]))
        prompt = text if self._format == "text" else [{"role": "user", "content": text}]
        return {"prompt": prompt, "answer": str(result), "completion": str(result)}
