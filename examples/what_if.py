"""A plan that is there already: what it costs, where its time goes, and what would make it faster.

python examples/what_if.py [plan.yaml]
"""

from __future__ import annotations

import sys
from dataclasses import replace

import mist_megatron as mm


def main(path: str | None = None) -> None:
    plan = mm.recipe("gpt3-7b-2x8-l4") if path is None else mm.load_plan(path)

    predicted = mm.predict(plan)
    print(predicted)
    fullest = max(predicted.prediction.stages, key=lambda stage: stage.peak_memory_bytes / stage.limit_bytes)
    for name, size in sorted(fullest.memory_terms_bytes.items(), key=lambda term: -term[1])[:3]:
        print(f"  {size / 2**30:6.2f} GiB {name}")

    print("\nplayed event by event")
    as_it_is = mm.simulate(plan)
    print(as_it_is)
    for name, scale in {
        "matrix products twice as fast": "op=matmul:0.5",
        "a network of twice the bandwidth": "link=inter:2",
    }.items():
        changed = mm.simulate(plan, scale=scale)
        print(f"{name}: {as_it_is.iteration_s / changed.iteration_s:.2f} times as fast")

    # Plans are frozen values: a variant is a copy.
    resident = tuple(replace(stage, offload=mm.Offload()) for stage in plan.stages)
    variant = mm.predict(replace(plan, stages=resident))
    fits = "fits" if variant.fits else "does not fit"
    print(f"with everything on the GPUs it takes {variant.iteration_s:.4g} s a step, and {fits}")

    try:  # and a target may refuse one
        mm.predict(replace(plan, target="deepspeed"))
    except mm.MistError as refused:
        print(refused)


if __name__ == "__main__":
    main(*sys.argv[1:])
