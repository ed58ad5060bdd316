"""Arithmetic of the calculator: sums, differences, products and quotients of numbers, exactly."""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction

MAX_CHARACTERS = 200
MAX_DIGITS = 100
"""A result beyond this is refused: products of products grow without bound."""

_OPERATIONS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def evaluate(expression: str) -> str:
    """The value of an expression such as "2 * (3 + 4)": a whole number, or a fraction such as "7/2". ValueError says why it has
    none."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"found {len(expression)} characters; expected at most {MAX_CHARACTERS}")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError(f"cannot read {expression!r}; expected numbers with + - * / and parentheses") from None
    return str(value)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = Fraction(str(number)) if abs(number) < 10**MAX_DIGITS else None
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            value = -_value(operand) if isinstance(sign, ast.USub) else _value(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            value = _OPERATIONS[type(operation)](_value(left), _value(right))
        case _:
            raise ValueError(f"found {ast.unparse(node)!r:.60}; expected numbers with + - * / and parentheses")
    if value is None or max(abs(value.numerator), value.denominator) >= 10**MAX_DIGITS:
        raise ValueError(f"the result has more than {MAX_DIGITS} digits")
    return value
