"""Arithmetic problems, numbered: drawing two disjoint sets of them is drawing numbers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from math import comb, factorial, prod
from typing import Literal, TypeAlias

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from rlcore.spi import LazyRows, Row
from rlcore_math.config import ProblemConfig

Codes: TypeAlias = NDArray[np.int64]

MAX_SPACE = 2**62
"""Problems are numbered in int64."""


@frozen
class ProblemSpace:
    """All problems of one form. A problem's number has its operands, then its operations, as digits of a mixed base."""

    config: ProblemConfig

    @property
    def num_operands(self) -> int:
        """Different values of an operand."""
        return self.config.max_operand - self.config.min_operand + 1

    @property
    def num_patterns(self) -> int:
        """Different rows of operations between the operands."""
        return int(len(self.config.operations) ** (self.config.num_terms - 1))

    @property
    def size(self) -> int:
        """How many problems there are."""
        return int(self.num_operands**self.config.num_terms * self.num_patterns)

    def evaluation(self) -> Codes:
        """int64 [num_evaluation]: the problems held out, all different."""
        return self._draw(
            self.config.num_evaluation, np.random.default_rng([self.config.problem_seed, 1]), np.zeros(0, np.int64)
        )

    def train(self) -> Codes:
        """int64 [num_train]: problems to train on, all different; none is held out, nor is one that differs by order alone."""
        return self._draw(self.config.num_train, np.random.default_rng([self.config.problem_seed, 0]), self.evaluation())

    def num_left(self) -> int:
        """How many problems there are to train on."""
        held_out = self.evaluation()
        _, first = np.unique(self.canonical(held_out), return_index=True)
        return self.size - sum(self._num_exchanges(code) for code in held_out[first].tolist())

    def canonical(self, codes: Codes) -> Codes:
        """One number for all problems that differ by the order of summands with their signs, and of factors, alone."""
        patterns, members = np.unique(codes % self.num_patterns, return_inverse=True)
        operands, operations = self._digits(codes)
        order, starts = np.argsort(members, kind="stable"), np.searchsorted(np.sort(members), np.arange(len(patterns) + 1))
        numbers = np.zeros(len(codes), np.int64)
        for start, end in pairwise(starts.tolist()):
            rows = order[start:end]
            numbers[rows] = self._ordered(operands[rows], operations[rows[0]].tolist())
        return numbers

    def _ordered(self, operands: Codes, operations: Sequence[int]) -> Codes:
        """int64 [N]: for problems with the same operations, a number of what remains when order does not count."""
        numbers, signs = np.zeros(len(operands), np.int64), 0
        for (sign, length), starts in sorted(_alike(self._summands(operations)).items()):
            factors = np.stack([operands[:, start : start + length] for start in starts], axis=1)
            for product in np.sort(self._number(np.sort(factors, axis=2)), axis=1).T:
                numbers = numbers * self.num_operands**length + product
            for place in range(length * len(starts)):  # how the terms fall into summands, as the operations before them
                first = "-" if sign else "+" if "+" in self.config.operations else self.config.operations[0]
                number = self.config.operations.index(first if place % length == 0 else "*")
                signs = signs * len(self.config.operations) + number
        return numbers * self.num_patterns + signs % self.num_patterns

    def _summands(self, operations: Sequence[int]) -> list[tuple[bool, int, int]]:
        """(whether it is subtracted, its number of factors, its first operand's index) of each summand."""
        summands = [(False, 1, 0)]
        for index, number in enumerate(operations, start=1):
            if self.config.operations[number] == "*":
                sign, length, start = summands[-1]
                summands[-1] = (sign, length + 1, start)
            else:
                summands.append((self.config.operations[number] == "-", 1, index))
        return summands

    def problem(self, code: int) -> tuple[str, int]:
        """A problem's text, such as "37+58=", and its result."""
        operands, operations = (digits[0].tolist() for digits in self._digits(np.asarray([code], np.int64)))
        terms = [self.config.min_operand + operand for operand in operands]
        text, summands = str(terms[0]), [terms[0]]
        for number, term in zip(operations, terms[1:], strict=True):
            operation = self.config.operations[number]
            text += f"{operation}{term}"
            if operation == "*":
                summands[-1] *= term
            else:
                summands.append(term if operation == "+" else -term)
        return f"{text}=", sum(summands)

    def _digits(self, codes: Codes) -> tuple[Codes, Codes]:
        """Operands [N, num_terms] less min_operand, and the indices of the operations [N, num_terms - 1]."""
        rest, digits = codes, []
        bases = [len(self.config.operations)] * (self.config.num_terms - 1) + [self.num_operands] * self.config.num_terms
        for base in bases:
            rest, digit = np.divmod(rest, base)
            digits.append(digit)
        stacked = np.stack(digits[::-1], axis=1)
        return stacked[:, : self.config.num_terms], stacked[:, self.config.num_terms :]

    def _num_exchanges(self, code: int) -> int:
        """Problems that differ from this one by order alone: the first summand is added, all others stand anywhere."""
        operands, operations = (digits[0].tolist() for digits in self._digits(np.asarray([code], np.int64)))
        summands = self._summands(operations)
        alike = Counter((sign, *sorted(operands[start : start + length])) for sign, length, start in summands)
        num_subtracted = sum(sign for sign, *_ in summands)
        orders = comb(len(summands) - 1, num_subtracted) * factorial(num_subtracted) * factorial(len(summands) - num_subtracted)
        for (_, *factors), repeats in alike.items():
            arrangements = factorial(len(factors)) // prod(map(factorial, Counter(factors).values()))
            orders = orders // factorial(repeats) * arrangements**repeats
        return orders

    def _draw(self, number: int, random: np.random.Generator, excluded: Codes) -> Codes:
        """Different problems, none of which is an excluded one up to order; there must be so many."""
        if self.size <= 4 * number:
            return self._allowed(random.permutation(self.size), excluded)[:number]
        drawn = np.zeros(0, np.int64)
        while len(drawn) < number:
            codes = np.concatenate([drawn, random.integers(self.size, size=2 * number)])
            _, first = np.unique(codes, return_index=True)
            drawn = self._allowed(codes[np.sort(first)], excluded)
        return drawn[:number]

    def _allowed(self, codes: Codes, excluded: Codes) -> Codes:
        suspect = np.isin(self._operands_sorted(codes), self._operands_sorted(excluded))  # a quick look first: few remain
        allowed = ~suspect
        allowed[suspect] = ~np.isin(self.canonical(codes[suspect]), self.canonical(excluded))
        return codes[allowed]

    def _operands_sorted(self, codes: Codes) -> Codes:
        """One number for all problems with the same operands."""
        operands, _ = self._digits(codes)
        return self._number(np.sort(operands, axis=1))

    def _number(self, operands: Codes) -> Codes:
        """The numbers of digits [..., length] in the base num_operands."""
        numbers = np.zeros(operands.shape[:-1], np.int64)
        for digit in np.moveaxis(operands, -1, 0):
            numbers = numbers * self.num_operands + digit
        return numbers


def _alike(summands: Iterable[tuple[bool, int, int]]) -> dict[tuple[bool, int], list[int]]:
    """The first operands' indices of the summands of each sign and length."""
    starts = defaultdict(list)
    for sign, length, start in summands:
        starts[sign, length].append(start)
    return dict(starts)


def problem_rows(space: ProblemSpace, split: str, prompt_format: Literal["text", "chat"]) -> Sequence[Row]:
    """The rows of "train" or "evaluation"."""
    if split not in ("train", "evaluation"):
        raise ValueError(f'found split {split!r}; expected "train" or "evaluation"')
    codes = space.train() if split == "train" else space.evaluation()
    return LazyRows(len(codes), partial(problem_row, space, codes, prompt_format))


def problem_row(space: ProblemSpace, codes: Codes, prompt_format: Literal["text", "chat"], number: int) -> Row:
    """A row with the prompt, answer and completion of the problem codes[number]."""
    text, result = space.problem(int(codes[number]))
    prompt = text if prompt_format == "text" else [{"role": "user", "content": text}]
    return {"prompt": prompt, "answer": str(result), "completion": str(result)}
