"""Links between the nodes of one cluster, as somebody measured them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from mist_megatron.errors import InputError
from mist_megatron.spec import check

MOST_HOSTS = 4096
"""A matrix of them has 16.8 million pairs."""
FASTEST_BYTES_PER_S = 2e12
"""NVLink 5 carries 0.9 TB/s each way: no link between nodes carries more than a domain of it."""
UNREPEATED_SPREAD = 0.03
"""Of a pair that was measured once: the two published snapshots of the 240 pairs of Pipette's 16-node cluster
differ by 3.1 % (standard deviation of the logarithm of their ratio)."""
HOST = re.compile(r"\w[\w-]*(\.\w[\w-]*)*\.?(:\d+)?", re.ASCII)
"""A name or an address; mpiGraph adds the number of a process. Launch scripts and files carry it."""
Rates = tuple[tuple[float | None, ...], ...]


def short_name(host: str) -> str:
    """Without its domain and without the number that mpiGraph adds to a process."""
    name = host.split(":", 1)[0]
    return name if name.replace(".", "").isdigit() else name.split(".", 1)[0]


@dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    """What each node sends each other one, all of `gpus_at_once` GPUs of both nodes taking part."""

    hosts: tuple[str, ...]
    """Names of the nodes: physical node n of the cluster is hosts[n]."""
    bytes_per_s: Rates
    """Of one GPU, from the row's node to the column's; None was never measured, 0 is a dead link."""
    gpus_at_once: int = 1
    message_bytes: float | None = None
    """Of the messages with which it was measured."""
    date: str = ""
    source: str = ""
    spread: float | None = None
    """Standard deviation of repeats of a pair over their mean; None where nothing was repeated."""
    repeats: int = 1
    inside: tuple[Rates, ...] = ()
    """By host, between its GPUs, from the row's to the column's; empty where nobody measured them."""

    def __post_init__(self) -> None:
        count = len(self.hosts)
        if not 2 <= count <= MOST_HOSTS:
            raise InputError(f"links: {count} hosts; wanted 2 to {MOST_HOSTS}")
        for host in self.hosts:
            check.name("links: host", host)
            if not HOST.fullmatch(host):
                raise InputError(
                    f"links: host {host!r} is no host name; wanted letters, digits, '-', '_' and '.'"
                )
        shorts = [short_name(host) for host in self.hosts]
        twice = next((host for host in shorts if shorts.count(host) > 1), None)
        if twice is not None:
            raise InputError(f"links: host {twice} is named twice; wanted one row a node")
        check.at_least("links", 1, gpus_at_once=self.gpus_at_once, repeats=self.repeats)
        check.positive("links", message_bytes=self.message_bytes)
        if self.spread is not None and not 0.0 <= self.spread < math.inf:
            raise InputError(f"links: spread is {self.spread:g}; wanted 0 or more")
        if len(self.bytes_per_s) != count or any(len(row) != count for row in self.bytes_per_s):
            raise InputError(f"links: the matrix is not {count} x {count}; wanted a row and a column a host")
        for a, b, rate in self.pairs():
            if rate is not None and not (math.isfinite(rate) and 0.0 <= rate <= FASTEST_BYTES_PER_S):
                raise InputError(
                    f"links: {self.hosts[a]} to {self.hosts[b]} is {rate:g} bytes/s; wanted from 0 to "
                    f"{FASTEST_BYTES_PER_S:g}: check the units"
                )
        self._check_inside()
        if not self.rates:
            raise InputError("links: no pair has a rate above 0; wanted some that were measured")

    def _check_inside(self) -> None:
        if not self.inside:
            return
        gpus = len(self.inside[0])
        if len(self.inside) != len(self.hosts) or gpus < 2:
            raise InputError(
                f"links: inside is of {len(self.inside)} hosts; wanted one table a host, or none"
            )
        for host, rows in zip(self.hosts, self.inside, strict=True):
            rates = [rate for row in rows for rate in row if rate is not None]
            if len(rows) != gpus or any(len(row) != gpus for row in rows):
                raise InputError(f"links: inside {host} is not {gpus} x {gpus}; wanted as many GPUs a host")
            if not all(math.isfinite(rate) and 0.0 <= rate <= FASTEST_BYTES_PER_S for rate in rates):
                raise InputError(f"links: inside {host} has rates below 0 or above {FASTEST_BYTES_PER_S:g}")

    def inside_shares(self, node: int) -> tuple[tuple[float, ...], ...]:
        """Of the fastest pair of a node's GPUs, what each pair has, the slower way: usual figures are of such
        pairs. One that nobody measured has what the slowest has, all have 1 where none was measured."""
        rows = self.inside[node]
        gpus = range(len(rows))
        rates = [rows[a][b] for a in gpus for b in gpus if a != b]
        known = [rate for rate in rates if rate is not None]
        most, least = max(known, default=0.0) or 1.0, min((rate for rate in known if rate), default=1.0)

        def share(a: int, b: int) -> float:
            ways = [rate for rate in (rows[a][b], rows[b][a]) if rate is not None]
            return 1.0 if a == b or not known else min(ways, default=least) / most

        return tuple(tuple(share(a, b) for b in gpus) for a in gpus)

    def pairs(self) -> Iterable[tuple[int, int, float | None]]:
        """Row, column and rate of all pairs of different nodes."""
        for a, row in enumerate(self.bytes_per_s):
            for b, rate in enumerate(row):
                if a != b:
                    yield a, b, rate

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Of all links that work."""
        return tuple(rate for _, _, rate in self.pairs() if rate)

    @cached_property
    def median_bytes_per_s(self) -> float:
        rates = sorted(self.rates)
        middle = len(rates) // 2
        return rates[middle] if len(rates) % 2 else 0.5 * (rates[middle - 1] + rates[middle])

    @property
    def variation(self) -> float:
        """Standard deviation of the links over their mean."""
        mean = math.fsum(self.rates) / len(self.rates)
        return math.sqrt(math.fsum((rate - mean) ** 2 for rate in self.rates) / len(self.rates)) / mean

    @property
    def noise(self) -> float:
        """Relative error of one pair's figure: of repeats, or what such figures usually have."""
        if self.spread is None:
            return UNREPEATED_SPREAD
        return self.spread / math.sqrt(self.repeats)

    @property
    def unmeasured(self) -> tuple[tuple[str, str], ...]:
        """Pairs without a figure either way."""
        return tuple(
            (self.hosts[a], self.hosts[b])
            for a, b, rate in self.pairs()
            if a < b and rate is None and self.bytes_per_s[b][a] is None
        )

    @property
    def dead(self) -> tuple[tuple[str, str], ...]:
        """Links that carry nothing."""
        return tuple((self.hosts[a], self.hosts[b]) for a, b, rate in self.pairs() if rate == 0.0)

    def rate(self, a: int, b: int) -> float:
        """From one node to another. What was measured the other way only stands for both; what was never
        measured counts as the slowest link that was, so that nothing looks good for not having been looked
        at."""
        measured = self.bytes_per_s[a][b]
        if measured is None:
            measured = self.bytes_per_s[b][a]
        return min(self.rates) if measured is None else measured

    def index(self, host: str) -> int | None:
        """Of a name, with or without its domain."""
        shorts = [short_name(name) for name in self.hosts]
        return shorts.index(short_name(host)) if short_name(host) in shorts else None

    def take(self, nodes: Sequence[int]) -> LinkMatrix:
        """Of these nodes only, in this order."""
        return replace(
            self,
            hosts=tuple(self.hosts[node] for node in nodes),
            bytes_per_s=tuple(tuple(self.bytes_per_s[a][b] for b in nodes) for a in nodes),
            inside=tuple(self.inside[node] for node in nodes) if self.inside else (),
        )

    def loaded_share(self, gpus_per_node: int, node_bytes_per_s: float) -> float:
        """What to multiply each rate by so that it is of one GPU while all GPUs of a node send.

        With as many at once as a node has, 1. With fewer, a node carries at least what they had together and
        what its network is known to carry (`node_bytes_per_s`); shared out, that is less than what one had
        alone where GPUs share adapters, and no less where each has its own."""
        together = max(self.gpus_at_once * self.median_bytes_per_s, node_bytes_per_s)
        if self.gpus_at_once >= gpus_per_node:
            return 1.0
        return min(together / (gpus_per_node * self.median_bytes_per_s), 1.0)
