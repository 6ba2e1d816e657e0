"""Expressions as people read them: common factors outside, divisors below one line."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from mist_megatron.cost.algebra import (
    Expr,
    Maximum,
    Minimum,
    Number,
    Product,
    Sum,
    Symbol,
    base_and_exponent,
    common_factor,
)


def text_of(expression: Expr) -> str:
    """`2*b*h*(s + 1)/tp`."""
    if isinstance(expression, Symbol):
        return expression.name
    if isinstance(expression, Maximum | Minimum):
        name = "Max" if isinstance(expression, Maximum) else "Min"
        return f"{name}({', '.join(sorted(map(text_of, expression.args), key=_by_length))})"
    if isinstance(expression, Sum) and common_factor(expression.args) == 1:
        return _terms(expression.args)
    times, powers = Fraction(1), dict[str, int]()
    for factor in expression.args if isinstance(expression, Product) else (expression,):
        for base, exponent in _factors(factor):
            if isinstance(base, Number):
                times *= base.value**exponent
            else:
                text = f"({_terms(base.args)})" if isinstance(base, Sum) else text_of(base)
                powers[text] = powers.get(text, 0) + exponent
    return _fraction(times, powers)


def _factors(factor: Expr) -> list[tuple[Expr, int]]:
    """A factor as bases and exponents; of a sum what its terms have in common apart."""
    base, exponent = base_and_exponent(factor)
    if not isinstance(base, Sum) or (common := common_factor(base.args)) == 1:
        return [(base, exponent)]
    rest = Sum("", tuple(term / common for term in base.args))
    parts = common.args if isinstance(common, Product) else (common,)
    return [(rest, exponent), *((one, power * exponent) for one, power in map(base_and_exponent, parts))]


def _fraction(times: Fraction, powers: dict[str, int]) -> str:
    above = [_power(text, e) for text, e in sorted(powers.items(), key=_in_brackets_last) if e > 0]
    below = [_power(text, -e) for text, e in sorted(powers.items(), key=_in_brackets_last) if e < 0]
    if abs(times.numerator) != 1 or not above:
        above.insert(0, str(abs(times.numerator)))
    if times.denominator != 1:
        below.insert(0, str(times.denominator))
    line = f"/({'*'.join(below)})" if len(below) > 1 else f"/{below[0]}" if below else ""
    return ("-" if times < 0 else "") + "*".join(above) + line


def _power(text: str, exponent: int) -> str:
    return text if exponent == 1 else f"{text}^{exponent}"


def _in_brackets_last(power: tuple[str, int]) -> tuple[bool, str]:
    return not power[0].isidentifier(), power[0]


def _terms(terms: Sequence[Expr]) -> str:
    first, *others = sorted(map(text_of, terms), key=_by_length)
    return first + "".join(f" - {text[1:]}" if text.startswith("-") else f" + {text}" for text in others)


def _by_length(text: str) -> tuple[bool, bool, int, str]:
    """What is taken away after what is added, numbers last of these, short before long."""
    return text.startswith("-"), text[0].isdigit() and "*" not in text, len(text), text
