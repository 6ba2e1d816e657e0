"""Exact expressions in symbols: sums, products, whole powers, maxima and minima over fractions.

All that sizes of layers and stages need of an algebra: equal expressions are equal however they came about
(terms and factors are collected, a number is multiplied into a sum), so that equal work is found and terms
cancel, and nothing is rounded before a program runs. A library for this was four tenths of an installation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b

Value = int | float | Fraction
"""Numbers that expressions are made with; a float stands for the fraction that it is exactly."""
KEPT = 1 << 14
"""Results that each operation keeps: a model's layers and stages meet the same operands again and again."""


class Expr:
    """One expression, which never changes; `args` are its operands, in the same order everywhere."""

    __slots__ = ("_hash", "args", "key", "place")

    def __init__(self, head: str, args: tuple[Expr, ...]) -> None:
        text = f"{type(self).__name__} {head} {' '.join(arg.key for arg in args)}"
        self.key: str = blake2b(text.encode(), digest_size=16).hexdigest()
        """The same of equal expressions, in every process."""
        self.place = (3, self.key)
        """Among operands: numbers, symbols by their names, their powers, and what is made of more."""
        self.args = args
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, int | float | Fraction):
            other = number(other)
        return self is other or (isinstance(other, Expr) and self.key == other.key)

    def __add__(self, other: Expr | Value) -> Expr:
        return _sum((self, as_expression(other)))

    def __radd__(self, other: Value) -> Expr:
        return _sum((number(other), self))

    def __sub__(self, other: Expr | Value) -> Expr:
        return _sum((self, -as_expression(other)))

    def __rsub__(self, other: Value) -> Expr:
        return _sum((number(other), -self))

    def __neg__(self) -> Expr:
        return _product((_MINUS, self))

    def __mul__(self, other: Expr | Value) -> Expr:
        return _product((self, as_expression(other)))

    def __rmul__(self, other: Value) -> Expr:
        return _product((number(other), self))

    def __truediv__(self, other: Expr | Value) -> Expr:
        return _product((self, as_expression(other) ** -1))

    def __rtruediv__(self, other: Value) -> Expr:
        return _product((number(other), self**-1))

    def __pow__(self, exponent: int) -> Expr:
        if isinstance(self, Product):
            return _product(tuple(arg**exponent for arg in self.args))
        return _product((_power(self, exponent),))

    def replaced(self, names: Mapping[Symbol, Symbol]) -> Expr:
        """The same with other symbols."""
        return self._of([arg.replaced(names) for arg in self.args]) if names else self

    def _of(self, args: list[Expr]) -> Expr:
        """An expression of this kind."""
        raise NotImplementedError


class Number(Expr):
    """A fraction."""

    __slots__ = ("value",)

    def __init__(self, value: Fraction) -> None:
        super().__init__(str(value), ())
        self.place = (0, self.key)
        self.value = value
        self._hash = hash(value)

    def __bool__(self) -> bool:
        return self.value != 0

    def _of(self, args: list[Expr]) -> Expr:
        return self


class Symbol(Expr):
    """Something by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        super().__init__(name, ())
        self.place = (1, name)
        self.name = name

    def replaced(self, names: Mapping[Symbol, Symbol]) -> Expr:
        return names.get(self, self)


class Sum(Expr):
    """Of two or more terms, none a sum, no two of which differ in their number only."""

    __slots__ = ()

    def _of(self, args: list[Expr]) -> Expr:
        return _sum(tuple(args))


class Product(Expr):
    """Of two or more factors, none a product, no two of the same base; a number comes first."""

    __slots__ = ()

    def _of(self, args: list[Expr]) -> Expr:
        return _product(tuple(args))


class Power(Expr):
    """What is no number, product or power, to a whole power other than 0 and 1."""

    __slots__ = ("exponent",)

    def __init__(self, base: Expr, exponent: int) -> None:
        super().__init__(str(exponent), (base,))
        self.place = (2, str(base.place))
        self.exponent = exponent

    def _of(self, args: list[Expr]) -> Expr:
        return args[0] ** self.exponent


class Maximum(Expr):
    """The largest of two or more."""

    __slots__ = ()

    def _of(self, args: list[Expr]) -> Expr:
        return maximum(*args)


class Minimum(Expr):
    """The smallest of two or more."""

    __slots__ = ()

    def _of(self, args: list[Expr]) -> Expr:
        return minimum(*args)


@lru_cache(KEPT)
def number(value: Value, over: int = 1) -> Number:
    """A whole number or fraction."""
    return Number(Fraction(value) / over)


_MINUS, _ZERO, _ONE = number(-1), number(0), number(1)


def as_expression(value: Expr | Value) -> Expr:
    """Numbers as expressions."""
    return value if isinstance(value, Expr) else number(value)


def maximum(*values: Expr | Value) -> Expr:
    """The largest: not evaluated, but for values that are equal."""
    args = _ordered({as_expression(value) for value in values})
    return args[0] if len(args) == 1 else Maximum("", args)


def minimum(*values: Expr | Value) -> Expr:
    """The smallest, likewise."""
    args = _ordered({as_expression(value) for value in values})
    return args[0] if len(args) == 1 else Minimum("", args)


def _ordered(args: Iterable[Expr]) -> tuple[Expr, ...]:
    return tuple(sorted(args, key=lambda arg: arg.place))


def coefficient(term: Expr) -> tuple[Fraction, Expr]:
    """The number of a term, and the rest of it."""
    if isinstance(term, Number):
        return term.value, _ONE
    if isinstance(term, Product) and isinstance(first := term.args[0], Number):
        rest = term.args[1:]
        return first.value, rest[0] if len(rest) == 1 else Product("", rest)
    return Fraction(1), term


def base_and_exponent(factor: Expr) -> tuple[Expr, int]:
    """What a factor is a power of."""
    return (factor.args[0], factor.exponent) if isinstance(factor, Power) else (factor, 1)


@lru_cache(KEPT)
def _sum(terms: tuple[Expr, ...]) -> Expr:
    counts: dict[Expr, Fraction] = {}
    known: dict[Expr, Expr] = {}
    for term in terms:
        for one in term.args if isinstance(term, Sum) else (term,):
            times, rest = coefficient(one)
            if rest in counts:
                counts[rest] += times
                known[rest] = _times(counts[rest], rest)
            else:
                counts[rest], known[rest] = times, one
    args = _ordered(known[rest] for rest, times in counts.items() if times)
    if len(args) < 2:
        return args[0] if args else _ZERO
    return Sum("", args)


def _times(times: Fraction, rest: Expr) -> Expr:
    """A term of a sum."""
    if rest == _ONE or times == 1:
        return rest if times == 1 else Number(times)
    return Product("", (Number(times), *(rest.args if isinstance(rest, Product) else (rest,))))


@lru_cache(KEPT)
def _product(factors: tuple[Expr, ...]) -> Expr:
    times, exponents = Fraction(1), dict[Expr, int]()
    for factor in factors:
        for one in factor.args if isinstance(factor, Product) else (factor,):
            if isinstance(one, Number):
                times *= one.value
            else:
                base, exponent = base_and_exponent(one)
                exponents[base] = exponents.get(base, 0) + exponent
    args = _ordered(_power(base, exponent) for base, exponent in exponents.items() if exponent)
    if not times or not args:
        return Number(times)
    if times == 1:
        return args[0] if len(args) == 1 else Product("", args)
    if len(args) == 1 and isinstance(args[0], Sum):
        return _sum(tuple(_product((Number(times), term)) for term in args[0].args))
    return Product("", (Number(times), *args))


@lru_cache(KEPT)
def _power(base: Expr, exponent: int) -> Expr:
    if isinstance(base, Number):
        return Number(base.value**exponent)
    inner, power = base_and_exponent(base)
    exponent *= power
    return _ONE if exponent == 0 else inner if exponent == 1 else Power(inner, exponent)


def common_factor(terms: Iterable[Expr]) -> Expr:
    """What all terms of a sum have in common, above or below the line."""
    numbers: list[Fraction] = []
    common: dict[Expr, int] | None = None
    for term in terms:
        times, rest = coefficient(term)
        numbers.append(times)
        factors = rest.args if isinstance(rest, Product) else (rest,) if rest != _ONE else ()
        own = dict(base_and_exponent(factor) for factor in factors)
        if common is None:
            common = own
        common = {base: min(e, own[base], key=abs) for base, e in common.items() if e * own.get(base, 0) > 0}
    over = math.lcm(*(each.denominator for each in numbers))
    times = Fraction(math.gcd(*(each.numerator * (over // each.denominator) for each in numbers)), over)
    times = times if max(numbers) > 0 else -times
    return _product((Number(times), *(_power(base, exponent) for base, exponent in (common or {}).items())))
