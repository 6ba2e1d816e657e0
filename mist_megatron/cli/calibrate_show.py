"""A profile as text of 80 columns."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from mist_megatron.cli.output import table


def show_profile(people: Console, described: dict[str, Any]) -> None:
    """Figures, curves, co-runs, tables and sources, each with its points and error."""
    people.print(
        f"{described['name']} ({described['content_hash']}), of {described['gpu']}: "
        f"{described['figures_measured']} of {described['figures_total']} figures measured",
        markup=False,
    )
    if described["note"]:
        people.print(described["note"], markup=False)
    if described["versions"]:
        people.print(", ".join(f"{k} {v}" for k, v in described["versions"].items()), markup=False)
    _figures(people, described["figures"])
    _collectives(people, described["collectives"])
    _interference(people, described["interference"])
    _tables(people, described["tables"])
    for learned in described["learned_memory"]:
        people.print(
            f"\nmemory beyond what is computed, for {learned['target']}: learned of {learned['rows']} runs "
            f"of {learned['framework']} {learned['version']}; held-out error {learned['analytic_error']:.1%} "
            f"without it, {learned['held_out_error']:.1%} with it, margin {learned['margin']:.1%}",
            soft_wrap=True, markup=False,
        )  # fmt: skip
    people.print()
    people.print("sources", style="bold")
    for key, source in described["sources"].items():
        people.print(f"{key} ({source['origin']}{_sigma(source)}): {source['text']}", markup=False)


def _sigma(source: dict[str, Any]) -> str:
    return "" if source["uncertainty"] is None else f", +-{source['uncertainty']:.0%}"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _figures(people: Console, figures: list[dict[str, Any]]) -> None:
    columns = ("figure", "value", "unit", "origin", "source", "points", "error")
    rows = [
        [
            _short(f["name"]), f"{f['scaled']:.4g}", f["unit"], f["origin"], f["source"],
            _count(f["points"]), _off(f),
        ]
        for f in figures
    ]  # fmt: skip
    people.print()
    people.print(table(columns, rows, right=("value", "points", "error")))


def _short(name: str) -> str:
    """Without what the unit says."""
    name = name.replace("_bytes_per_parameter", "_per_parameter")
    for suffix in ("_bytes_per_s", "_parameters_per_s", "_fraction", "_mhz", "_s"):
        name = name.removesuffix(suffix)
    return name


def _off(figure: dict[str, Any]) -> str:
    """The fit's error, or else the uncertainty that its source states."""
    if figure["error"] is None and figure["uncertainty"] is not None:
        return f"+-{figure['uncertainty']:.0%}"
    return _error(figure["error"])


def _collectives(people: Console, curves: list[dict[str, Any]]) -> None:
    if not curves:
        return
    columns = ("collective", "ranks", "nodes", "latency us", "GB/s", "source", "points", "error")
    rows = [
        [
            c["kind"] + (" strided" if c["strided"] else ""), str(c["ranks"]), str(c["nodes"]),
            f"{c['latency_s'] * 1e6:.3g}", f"{c['bytes_per_s'] / 1e9:.3g}", c["source"],
            _count(c["points"]), _error(c["error"]),
        ]
        for c in curves
    ]  # fmt: skip
    people.print()
    people.print(table(columns, rows, right=(*columns[1:5], *columns[6:])))


def _interference(people: Console, sets: list[dict[str, Any]]) -> None:
    if not sets:
        return
    columns = ("co-run", "slowdown of each (? not determined)", "source", "points", "error")
    rows = []
    for item in sets:
        sigmas = item["sigma"] or [None] * len(item["factors"])
        factors = [
            f"{factor:.3g}{'?' if not sure else '' if sigma is None else f'±{sigma:.0%}'}"
            for factor, sure, sigma in zip(item["factors"], item["identified"], sigmas, strict=True)
        ]
        rows.append(
            ["+".join(item["streams"]), " ".join(factors), item["source"], _count(item["points"]),
             _error(item["error"])]
        )  # fmt: skip
    people.print()
    people.print(table(columns, rows, right=columns[3:]))


def _tables(people: Console, tables: list[dict[str, Any]]) -> None:
    if not tables:
        return
    columns = ("table", "type", "rows", "source", "from the least to the largest")
    rows = []
    for item in tables:
        ranges = ", ".join(f"{name} {low:.4g}-{high:.4g}" for name, (low, high) in item["ranges"].items())
        rows.append([item["operator"], item["precision"], str(item["rows"]), item["source"], ranges])
    people.print()
    people.print(table(columns, rows, right=("rows",)))
