"""Laws that hold for every job, tried on random ones through the Python API.

    python reliability/laws.py [--jobs 500] [--seed 1] [--brief] [--switched | --bounds] [--record]

Each job is small, of any target, with odd batches, nodes of three GPUs, short memory and slow links among
them. Of its best plan is asked: that `predict` tells the same of it and finds that it fits; that what
`explain` prints ends at that time; that its target's files can be written; that events tell its time within
3 %; that it stays the best whatever `--top` is, and when its own sizes are fixed, in any order; that more
memory, quicker links or a larger space give no slower plan; and that another process, of another hash seed
and with two workers, writes the same to the last byte. `--switched` asks all but the last of jobs of Megatron
with something fixed that is seldom the best: modules whose activations leave or that are run again, sharded
weights, graphs, traffic beside products. `--bounds` asks another law, of jobs whose links are drawn too: that
the bounds by which a search proves its plan are no higher than the shapes' own best plans.
Printed: how often each law held, and every job that broke one; a traceback breaks one too.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from report import record

import mist_megatron as mm
from mist_megatron.search import queue
from mist_megatron.search.bounds import SearchProblem
from mist_megatron.search.solve import solve
from mist_megatron.spec.experts import ExpertSpec

TARGETS = ("mist", "megatron", "megatron+patches", "deepspeed", "deepspeed+patches")
RUNNABLE = TARGETS[1:]
"""Mist's own runtime is no framework that files could be written for."""
ROUNDING = 1e-9
NEAR = 0.03
ELSEWHERE_EACH = 10
"""Of so many jobs one is asked in two more processes."""
EVENTS = "events tell the time within 3 %"
"""The one law that is known to break, of plans that are seldom the best: where Megatron's patches offload
activations and where one border of interleaved stages lies between nodes. `tune` says so then."""
ENDS = "a search ends with an answer"
BOUNDS = "no shape's bound is above its best plan"
SMALLER_SPACES = {
    "mist": ("mist-zero", "mist-ckpt", "3d"),
    "megatron": ("megatron", "megatron-expert", "3d"),
    "megatron+patches": ("megatron", "mist-ckpt"),
    "deepspeed": ("deepspeed",),
    "deepspeed+patches": ("deepspeed",),
}


@dataclass
class Tally:
    """What was tried and what broke."""

    held: Counter[str] = field(default_factory=Counter)
    broke: dict[str, list[str]] = field(default_factory=dict)
    apart: list[float] = field(default_factory=list)
    """What `predict` tells beside what events tell, minus 1."""
    shapes: int = 0
    """Whose bounds were held against their best plans."""
    seed: int | None = None
    """Of the job that is being tried, if it is a random one."""

    def law(self, name: str, holds: bool, job: Mapping[str, Any], said: str = "") -> None:
        if holds:
            self.held[name] += 1
        else:
            which = "" if self.seed is None else f"job {self.seed} "
            self.broke.setdefault(name, []).append(f"{said}: {which}{job_words(job)}")
            print(f"broke: {name}: {said}: {which}".rstrip(": "), file=sys.stderr, flush=True)


def job_words(job: Mapping[str, Any]) -> str:
    """Enough to try it again."""
    model = job["model"]
    shape = f"layers={model.layers} hidden={model.hidden} heads={model.heads} vocab={model.vocab}"
    return f"{shape} " + " ".join(f"{key}={value}" for key, value in job.items() if key != "model")


def random_job(seed: int) -> dict[str, Any]:
    """The arguments of `tune`."""
    rng = random.Random(seed)
    target = TARGETS[seed % len(TARGETS)]
    per_node, nodes = rng.choice([(1, 1), (1, 4), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 2), (8, 1)])
    heads = rng.choice([8, 12, 16])
    width, gated = rng.choice([64, 128]), rng.random() < 0.5
    model = mm.ModelSpec(
        name="small",
        family="llama",
        layers=rng.choice([2, 4, 6, 12]),
        hidden=heads * width,
        ffn_hidden=heads * 256,
        heads=heads,
        kv_heads=rng.choice([heads, heads // 4]),
        head_dim=width,
        vocab=rng.choice([8192, 50304]),
        gated_mlp=gated,
        activation="silu" if gated else "gelu",
        norm="rmsnorm",
        tied_embeddings=rng.random() < 0.3,
    )
    if target == "megatron" and rng.random() < MIXTURES:
        model = mixture(model, rng)
    return {
        "model": model,
        "gpus": nodes * per_node,
        "gpus_per_node": per_node,
        "gpu": rng.choice(["a100-sxm-40gb", "l4-24gb", "h100-sxm-80gb", "v100-sxm-32gb"]),
        "global_batch": nodes * per_node * rng.choice([1, 2, 4, 6]),
        "seq": rng.choice([512, 1024, 2048]),
        "precision": "fp16",
        "target": target,
        "memory_limit": f"{rng.choice([2, 4, 8, 20])}GiB",
        "bandwidth": {"inter": f"{rng.choice([1, 5, 25])}GB/s"},
        "grid": 0.5,
    }


MIXTURES = 0.3
"""Of stock Megatron's jobs."""


def mixture(model: mm.ModelSpec, rng: random.Random) -> mm.ModelSpec:
    """The same with experts in place of the MLP of all layers, of all but the first, or of every second."""
    experts = ExpertSpec(
        count=rng.choice([4, 8]),
        top_k=rng.choice([2, 3]),
        ffn_hidden=model.ffn_hidden // 2,
        shared_ffn_hidden=rng.choice([0, 256]),
        first_dense=rng.choice([0, 1]),
        every=rng.choice([1, 2]),
    )
    return replace(model, name="small mixture", gated_mlp=True, activation="silu", experts=experts)


def switched_job(seed: int) -> dict[str, Any]:
    """Of Megatron, with something fixed that is seldom the best: most often modules whose activations go."""
    job, rng = random_job(seed), random.Random(f"switches of {seed}")
    job["target"], patched = "megatron", job["target"] == "megatron+patches"
    if job["model"].experts is None and rng.random() < 0.3:
        job["model"] = mixture(job["model"], rng)
    job["memory_limit"] = f"{rng.choice([2, 3, 4, 8])}GiB"
    switch = rng.choice(["offload_modules"] * 3 + ["recompute_modules"] + [f"{name}=1" for name in SWITCHES])
    if switch == "offload_modules":
        switch = f"{switch}={'+'.join(modules_that_leave(job['model'], rng))}"
    elif switch == "recompute_modules":
        job["target"] = "megatron+patches" if patched else "megatron"
        again = ("core_attn", "mlp", *(("moe_act", "layernorm") if job["model"].experts else ()))
        switch = f"{switch}={'+'.join(rng.sample(again, rng.randint(1, len(again))))}"
    return {**job, "fix": [switch]}


SWITCHES = ("tp_comm_overlap", "megatron_fsdp", "cuda_graphs", "expert_overlap", "delayed_weight_grad")


def modules_that_leave(model: mm.ModelSpec, rng: random.Random) -> list[str]:
    """Some of those that a model has. What attention's last product reads leaves with the core's output."""
    there = ["qkv_linear", "core_attn", "attn_proj"]
    there += ["mlp_norm", "expert_fc1", "moe_act"] if model.experts is not None else []
    some = rng.sample(there, rng.randint(1, len(there)))
    return some if "core_attn" in some or "attn_proj" not in some else [*some, "core_attn"]


def best(job: Mapping[str, Any], **changed: Any) -> mm.Tuned | None:
    """The answer of `tune`; None where nothing fits, or what is fixed is refused."""
    try:
        return mm.tune(**{"top": 1, **job, **changed})
    except mm.NoFeasiblePlan:
        return None
    except mm.InputError:
        if "fix" not in job:
            raise
        return None


def slower(answer: mm.Tuned | None, than: mm.Tuned, by: float = ROUNDING) -> bool:
    return answer is None or answer.prediction.iteration_s > than.prediction.iteration_s * (1.0 + by)


def check(job: Mapping[str, Any], tally: Tally, *, brief: bool = False) -> None:
    """All laws on one job, or those that its one best plan tells."""
    tuned = best(job)
    if tuned is None:
        tally.held["nothing fits"] += 1
        return
    plan = tuned.plan
    try:
        told = mm.predict(plan)
    except mm.MistError as error:
        tally.law("predict tells what tune told", False, job, str(error))
        return
    same = abs(told.iteration_s - tuned.prediction.iteration_s) <= ROUNDING * told.iteration_s
    tally.law("predict tells what tune told", same, job, f"{told.iteration_s} s")
    tally.law("the plan fits", told.fits, job)
    printed_s = mm.explain(plan).derivation.steps[-1].value
    printed = abs(printed_s - told.iteration_s) <= ROUNDING * told.iteration_s
    tally.law("explain ends at what predict tells", printed, job, f"{printed_s} s")
    if job["target"] in RUNNABLE:
        try:
            mm.emit(plan)
            tally.law("its files can be written", True, job)
        except mm.MistError as error:
            tally.law("its files can be written", False, job, str(error))
    played = mm.simulate(plan).iteration_s
    apart = told.iteration_s / played - 1.0
    tally.apart.append(apart)
    tally.law(EVENTS, abs(apart) <= NEAR, job, f"{apart:+.1%}")
    if brief:
        return
    several = best(job, top=3)
    kept = several is not None and several.plan.stages == plan.stages
    tally.law("the best is the same whatever --top is", kept, job)
    sizes, used = [*job.get("fix", ()), *own_sizes(plan)], used_gpus(plan)
    own = best(job, fix=sizes, **used)
    same_order = same_plan(own, best(job, fix=sizes[::-1], **used))
    tally.law("the order of options changes nothing", same_order, job)
    tally.law("its own sizes fixed give it again", not slower(own, tuned), job, _told(own, tuned))
    for name, changed in easier(job):
        answer = best(job, **changed)
        tally.law(f"{name} is no slower", not slower(answer, tuned), job, _told(answer, tuned))
    for space in SMALLER_SPACES[job["target"]]:
        smaller = best(job, space=space)
        held = smaller is None or not slower(tuned, smaller)
        tally.law("a larger space is no slower", held, job, f"{space}: {_told(smaller, tuned)}")


def same_plan(one: mm.Tuned | None, other: mm.Tuned | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.plan == other.plan


ELSEWHERE = """
import sys
sys.path.insert(0, {folder!r})
from laws import best, random_job
from mist_megatron.formats.plan_yaml import plan_to_yaml
if __name__ == "__main__":
    found = best(random_job({seed}), workers={workers})
    print("nothing fits" if found is None else plan_to_yaml(found.plan))
"""


def written_elsewhere(seed: int, *, hash_seed: int, workers: int) -> str:
    """The plan file of a random job as another process writes it."""
    program = ELSEWHERE.format(folder=str(Path(__file__).resolve().parent), seed=seed, workers=workers)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "elsewhere.py"  # workers start from a file
        file.write_text(program)
        done = subprocess.run(
            [sys.executable, str(file)],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
        )
    return done.stdout


def check_elsewhere(seed: int, tally: Tally) -> None:
    """The same bytes whatever seeds the hashes and how many processes search."""
    one = written_elsewhere(seed, hash_seed=1, workers=1)
    other = written_elsewhere(seed, hash_seed=2, workers=2)
    tally.law("other processes write the same bytes", one == other, random_job(seed))


def _told(answer: mm.Tuned | None, usual: mm.Tuned) -> str:
    said = "nothing fits" if answer is None else f"{answer.prediction.iteration_s:.6g} s"
    return f"{said} against {usual.prediction.iteration_s:.6g} s"


def own_sizes(plan: mm.Plan) -> list[str]:
    """What all stages of a plan share, as `--fix` takes it."""
    sizes = {"pp": plan.pipeline_size, "vpp": plan.vpp, "grad_accum": plan.grad_accum}
    for name in ("dp", "tp", "micro_batch"):
        values = {getattr(stage, name) for stage in plan.stages}
        if len(values) == 1:
            sizes[name] = values.pop()
    return [f"{name}={value}" for name, value in sizes.items()]


def used_gpus(plan: mm.Plan) -> dict[str, int]:
    """The best plan may leave nodes out."""
    return {"gpus": plan.cluster.gpus, "gpus_per_node": plan.cluster.gpus_per_node}


def easier(job: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Jobs that no plan of the first is slower on."""
    limit = int(job["memory_limit"].removesuffix("GiB"))
    yield "more memory", {"memory_limit": f"{limit + 2}GiB"}
    inter = int(job["bandwidth"]["inter"].removesuffix("GB/s"))
    yield "a quicker network", {"bandwidth": {"inter": f"{2 * inter}GB/s"}}


def job_on_drawn_links(seed: int) -> dict[str, Any]:
    """Bounds are hardest on links that are slower than what is computed beside them. One job in five keeps
    the catalogue's, and one in five has experts besides those of `random_job`."""
    rng = random.Random(seed)
    job = random_job(seed)
    if rng.random() < 0.2:
        job = {**job, "target": "megatron", "model": mixture(job["model"], rng)}
    inter, intra = rng.choice([0.1, 0.3, 1, 5]), rng.choice([0.3, 1, 5, 100])
    links = {} if rng.random() < 0.2 else {"inter": f"{inter}GB/s", "intra": f"{intra}GB/s"}
    return {**job, "bandwidth": links}


Given = list[tuple[SearchProblem, queue.Pair]]
WATCHED: dict[str, Callable[[Any, Any], Any]] = {
    "_of_shapes": lambda told, items: told,
    "_of_kinds": lambda told, items: told.fit,
    "_of_groups": lambda told, items: told.fit,
    "with_room": lambda told, items: told[0],
    "mixture_bounds": zip,
}
"""What makes a search's bounds, and the pairs of bound and shape in what it says of some shapes."""


@contextmanager
def bounds_given() -> Iterator[Given]:
    """All bounds of shapes that searches are given meanwhile."""
    given: Given = []
    usual = {name: getattr(queue, name) for name in WATCHED}

    def watched(name: str) -> Callable[..., Any]:
        def bounded(question: SearchProblem, items: Any, *more: Any) -> Any:
            told = usual[name](question, items, *more)
            given.extend((question, pair) for pair in WATCHED[name](told, items))
            return told

        return bounded

    try:
        for name in WATCHED:
            setattr(queue, name, watched(name))
        yield given
    finally:
        for name, function in usual.items():
            setattr(queue, name, function)


MOST_SHAPES, MOST_CPU_S = 150, 60.0
"""Of a job, drawn from all that its search bounds."""


def check_bounds(seed: int, tally: Tally, *, most: int = MOST_SHAPES, cpu_s: float = MOST_CPU_S) -> None:
    """The law of bounds on a job: of some of its shapes the best plan is searched, with none to beat."""
    job = job_on_drawn_links(seed)
    with bounds_given() as given:
        best(job, workers=1)
    random.Random(seed).shuffle(given)
    furthest, which = 0.0, ""
    until_s = time.process_time() + cpu_s
    for question, (bound, shape) in given[:most]:
        if time.process_time() > until_s:
            break
        found = solve(question, shape, bound, float("inf")).solution
        if found is None:
            continue
        tally.shapes += 1
        above = bound.value_s / found.value_s - 1.0
        if above > furthest:
            ways = asdict(question.evaluator.job.execution).items()
            said = " ".join(f"{name}={way}" for name, way in ways if way not in (None, 1) or way is True)
            furthest, which = above, f"{shape} {said}".rstrip()
    tally.law(BOUNDS, furthest <= ROUNDING, job, f"{furthest:+.1e} of {which}")


def bounds_tried(jobs: int, seed: int) -> Tally:
    tally = Tally()
    for number in range(jobs):
        tally.seed = seed * 1_000_000 + number
        try:
            check_bounds(tally.seed, tally)
        except Exception as error:  # the other jobs are tried all the same
            tally.law(ENDS, False, job_on_drawn_links(tally.seed), f"{type(error).__name__}: {error}")
    return tally


def tried(jobs: int, seed: int, *, brief: bool = False, switched: bool = False) -> Tally:
    tally, job_of = Tally(), switched_job if switched else random_job
    for number in range(jobs):
        tally.seed = seed * 1_000_000 + number
        job = job_of(tally.seed)
        try:
            check(job, tally, brief=brief)
        except Exception as error:  # the other jobs are tried all the same
            tally.law(ENDS, False, job, f"{type(error).__name__}: {error}")
        else:
            tally.law(ENDS, True, job)
        if not (brief or switched) and number % ELSEWHERE_EACH == 0:
            check_elsewhere(tally.seed, tally)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--brief", action="store_true", help="one search a job: laws of its one best plan")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--switched", action="store_true", help="jobs of Megatron with something fixed")
    which.add_argument("--bounds", action="store_true", help="the law of bounds alone")
    parser.add_argument("--record", nargs="?", const="", metavar="CONDITIONS", help="into results/laws.json")
    asked = parser.parse_args()
    if asked.bounds:
        tally = bounds_tried(asked.jobs, asked.seed)
    else:
        tally = tried(asked.jobs, asked.seed, brief=asked.brief, switched=asked.switched)
    if asked.record is not None:
        counts = {
            law: (tally.held[law], len(tally.broke.get(law, ()))) for law in {*tally.held, *tally.broke}
        }
        broken = [f"{law}: {case}" for law, cases in sorted(tally.broke.items()) for case in cases]
        kind = ", bounds" if asked.bounds else ", switched" if asked.switched else ""
        name = f"{asked.jobs} of seed {asked.seed}{kind}"
        record("laws", {name: {"laws": counts, "broken": broken}}, asked.record)
    if asked.bounds:
        print(f"{tally.shapes} shapes")
    for name in sorted({*tally.held, *tally.broke}):
        print(f"{name}: {tally.held[name]} held, {len(tally.broke.get(name, ()))} broke")
    for name, cases in tally.broke.items():
        print(f"\n{name}")
        print("\n".join(f"  {case}" for case in cases))


if __name__ == "__main__":
    main()
