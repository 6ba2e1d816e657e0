"""`compare`: the same job under each named search space, as a speed-up table."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mist_megatron.cli.options import JobOptions, read_job
from mist_megatron.cli.output import OutputOptions, table
from mist_megatron.errors import InputError, NoFeasiblePlan

BAR = 24


def compare(
    job: JobOptions,
    *,
    spaces: Annotated[
        list[str] | None, typer.Option("--space", help="Spaces to compare; all by default.")
    ] = None,
    grid: Annotated[float, typer.Option(help="Step of the offload fractions.")] = 0.125,
    output: OutputOptions,
) -> None:
    """Prices the same job under each named space: what the freedom of each is worth."""
    from mist_megatron.cli.run_search import check_numbers, run_search
    from mist_megatron.search.search import Settings
    from mist_megatron.search.space import named_spaces, space_named

    taken = read_job(job)
    check_numbers(grid, 1, 1, None)
    chosen = [space_named(name) for name in spaces] if spaces else list(named_spaces())
    results: dict[str, dict[str, Any]] = {}
    for space in chosen:
        try:
            found = run_search(taken, space, Settings(step=grid), (1, None))
        except (NoFeasiblePlan, InputError) as error:
            results[space.name] = {"iteration_s": None, "reason": error.message}
            continue
        results[space.name] = {
            "iteration_s": found.predictions[0].iteration_s,
            "shape": str(found.result.solutions[0].shape),
            "seconds": found.seconds,
        }
    times = [r["iteration_s"] for r in results.values() if r["iteration_s"] is not None]
    if not times:
        raise NoFeasiblePlan(
            "no space has a plan that fits", details=tuple(f"{k}: {r['reason']}" for k, r in results.items())
        )
    slowest = max(times)
    for result in results.values():
        time_s = result["iteration_s"]
        result["speedup"] = None if time_s is None else slowest / time_s
    output.finish({"spaces": results, "defaults": dict(taken.defaults)})
    if not output.json:
        output.people.print(_table(results))


def _table(results: dict[str, dict[str, Any]]) -> Any:
    most = max(r["speedup"] for r in results.values() if r["speedup"] is not None)
    rows = []
    for name, result in results.items():
        if result["speedup"] is None:
            rows.append([name, "-", "-", "", result["reason"][:40]])
            continue
        length = round(BAR * result["speedup"] / most)
        rows.append(
            [
                name,
                f"{result['iteration_s']:.4g}",
                f"{result['speedup']:.2f}x",
                "█" * length,
                result["shape"],
            ]
        )
    return table(("space", "s/step", "speed-up", "", "plan"), rows, right=("s/step", "speed-up"))
