"""Values of expressions by walking over them in exact fractions: the plain version of `cost/compile.py`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from mist_megatron.cost.algebra import Expr, Maximum, Minimum, Number, Power, Product, Sum, Symbol, Value


def value_of(expression: Expr, numbers: Mapping[Symbol, Value]) -> Fraction:
    """What an expression is for these numbers; all its symbols have to have one."""
    if isinstance(expression, Symbol):
        return Fraction(numbers[expression])
    if isinstance(expression, Number):
        return expression.value
    values = [value_of(arg, numbers) for arg in expression.args]
    if isinstance(expression, Power):
        return values[0] ** expression.exponent
    ways = {Sum: sum, Product: math.prod, Maximum: max, Minimum: min}
    return Fraction(ways[type(expression)](values))
