"""Low-rank adapters (LoRA, arXiv:2106.09685): the model's own weights are kept as they are, and beside each
chosen matrix two thin ones are trained, whose product is added to what it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mist_megatron.errors import InputError
from mist_megatron.spec import check

AdapterPlace = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""A matrix of a layer, as `q_proj` ... `down_proj` of Hugging Face's models are called by PEFT."""
PLACES: tuple[AdapterPlace, ...] = get_args(AdapterPlace)


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Two matrices of `rank` columns and rows beside each of these."""

    rank: int
    """Width between the two."""
    on: tuple[AdapterPlace, ...] = PLACES
    """The matrices that have one; `gate` is left out where the MLP has none."""

    def __post_init__(self) -> None:
        check.at_least("adapter", 1, rank=self.rank)
        check.at_most("adapter", 65_536, "wider than any layer", rank=self.rank)
        if not self.on or len(set(self.on)) != len(self.on):
            raise InputError(f"adapter: on is {', '.join(self.on) or 'empty'}; wanted each matrix once")


def adapter_of(text: str, option: str = "--lora") -> Adapter:
    """From `16` or `16:q,v`."""
    rank, several, on = text.partition(":")
    if not (rank.isascii() and rank.strip().isdecimal()):
        raise InputError(f"{option}: got {text!r}, wanted a rank, as in {option} 16 or {option} 16:q,v")
    names = tuple(name.strip() for name in on.split(",")) if several else PLACES
    for name in names:
        check.known(option, "matrix", name, PLACES)
    known = {place: place for place in PLACES}
    return Adapter(rank=int(rank), on=tuple(known[name] for name in names if name in known))
