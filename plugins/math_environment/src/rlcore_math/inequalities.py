"""Solves conditions on one real number by sympy. It runs in worker processes, whose time is limited."""

from fractions import Fraction
from functools import cache
from typing import Any, TypeAlias

MAX_CHARACTERS = 200
"""Longest side of a relation; a longer one is not solved."""
DIGITS = 40
"""Digits by which bounds such as the square root of 2 are ordered."""
Bounds: TypeAlias = tuple[str, bool, str, bool]
"""The lower bound of an interval as LaTeX, whether it belongs to it, and the upper bound in the same way."""


@cache
def solved(left: str, sign: str, right: str, variable: str) -> tuple[Bounds, ...] | None:
    """Return the intervals of real numbers for which a relation holds; None where sympy does not find them.

    That is so for relations in other variables, and with functions besides roots, exponentials, logarithms and absolute values.
    """
    import sympy

    relations = {"<": sympy.Lt, ">": sympy.Gt, "\\le": sympy.Le, "\\ge": sympy.Ge, "=": sympy.Eq, "\\ne": sympy.Ne}
    sides = _expression(left), _expression(right)
    if None in sides:
        return None
    number = sympy.Symbol("x", real=True)
    difference = (sides[0] - sides[1]).subs(sympy.Symbol(variable), number)
    usual = (sympy.Abs, sympy.exp, sympy.log)
    if difference.free_symbols - {number} or not all(isinstance(one, usual) for one in difference.atoms(sympy.Function)):
        return None
    try:
        found = relations[sign](difference, 0)
        if found in (True, False):
            return (("-\\infty", False, "\\infty", False),) if found else ()
        if sign == "=":
            held = sympy.solveset(difference, number, sympy.S.Reals)
        else:
            held = sympy.solvers.inequalities.solve_univariate_inequality(found, number, relational=False)
    except (ArithmeticError, RuntimeError, TypeError, ValueError):  # where sympy has no method, among others
        return None
    pieces = [_bounds(piece) for piece in (held.args if isinstance(held, sympy.Union) else (held,))]
    return None if None in pieces else tuple(bounds for piece in pieces for bounds in piece or ())


def approximate(bound: str) -> Fraction | None:
    """Return a number that is written as LaTeX to DIGITS digits; None for anything else."""
    number = _expression(bound)
    if number is None or not number.is_number or not number.is_real or not number.is_finite:
        return None
    return Fraction(str(number.evalf(DIGITS)))


def _expression(text: str) -> Any:
    """Return the expression that LaTeX writes; None for anything else, such as a relation."""
    from latex2sympy2_extended import latex2sympy
    from sympy import Expr

    if len(text) > MAX_CHARACTERS:
        return None
    try:
        found = latex2sympy(text)
    except Exception:  # the grammar raises errors of its own and of sympy
        return None
    return found if isinstance(found, Expr) else None


def _bounds(piece: Any) -> list[Bounds] | None:
    """Return the intervals of a set of sympy; None for other sets than intervals and finite ones."""
    import sympy

    if isinstance(piece, sympy.Interval):
        ends = (piece.start, not piece.left_open, piece.end, not piece.right_open)
        if any(end.has(sympy.CRootOf) for end in ends[::2]):
            return None
        low, has_low, high, has_high = ends
        return [(_written(low), has_low, _written(high), has_high)]
    if piece is sympy.S.EmptySet:
        return []
    if isinstance(piece, sympy.FiniteSet) and not any(one.has(sympy.CRootOf) for one in piece):
        return [(_written(one), True, _written(one), True) for one in piece]
    return None


def _written(bound: Any) -> str:
    """Return a bound in the notation that `in_intervals` reads."""
    from sympy import latex

    return latex(bound, ln_notation=True).replace("\\left", "").replace("\\right", "")
