"""Makes docs/cost_model.md: symbols, terms and equations of the cost model, and one plan worked out.

Symbols and terms come from the lists that the product uses, the worked plan from `explain`; each equation
names the function that computes it, which has to exist. `python tests/refresh_documents.py` writes the page.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mist_megatron.ask.explain import Explained, explain
from mist_megatron.cost.derivation import Step
from mist_megatron.cost.explain import symbol_table
from mist_megatron.formats.files import load_plan
from mist_megatron.spec.term import Term, Traits

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "cost_model.md"
EXAMPLE = "llama-13b-4x8-l4"


@dataclass(frozen=True)
class Equation:
    """An equation in readable notation, where it comes from, and what computes it."""

    says: str
    text: str
    source: str
    where: str
    """Module and name, as in `cost.iteration:iteration_time`."""


ITERATION = (
    Equation(
        "One step of equal stages, and of chunks",
        "T1 = (G - 1) max_i t_i + sum_i t_i + max_i (d_i - sum_{j<i} t_j)",
        "Mist (EuroSys 2025), eq. 1",
        "cost.iteration:iteration_time",
    ),
    Equation(
        "One step under 1F1B, as it is told: the longest path that stands still at one stage b of p, with "
        "w = p - 1 - b and D_b = sum_{j>b} t_j",
        "T = max_b [ sum_{j<b} t_j + G t_b + wait_f + wait_b ] + max_i (d_i - sum_{j<i} t_j)\n"
        "wait_f = max(0, D_b - w f_b, w max_{i<b} (f_i - f_b)),   wait_b: the same of backward passes",
        "own; with equal stages it is eq. 1",
        "spec.schedule:_longest_path_s",
    ),
    Equation(
        "The same where layers step before their first forward pass, with states in host memory: those of "
        "the first stage's last layer leave w_0 later than its second forward pass could begin, and a stage "
        "of n layers takes in_s, step_s and out_s of each",
        "wait_f >= w_0 (stage 0), w_0 + f_0 - f_b (others)\n"
        "T >= in_s + (n - 1) overlap(step_s, gather_s, in_s, out_s) + step_s + out_s + host_step\n"
        "tied embeddings, last stage: d_last - sum_{j<i} t_j becomes what both ends do together, what it "
        "ends beyond sum b_j, and what it steps beyond sum f_j",
        "own; Mist (EuroSys 2025), section 5, for the template",
        "cost.iteration:Stepping",
    ),
    Equation(
        "Interleaved with v chunks, gpipe, and zero bubble with weight gradients w",
        "T = G max_i t_i + sum_i r_i - r_slowest + max_i (d_i - sum_{j<i} r_j)\n"
        "r = t / v (interleaved),   t - 2 w (zb-h1);   gpipe: (G - 1) (max f + max b) + sum t",
        "Narayanan et al. (SC'21), Huang et al. (NeurIPS 2019), Qi et al. (2023)",
        "spec.schedule:closed_form",
    ),
    Equation(
        "Stages that differ: what a border makes both its sides wait for, in parts moved in turn",
        "max(parts moved by either side) * send_recv(part)",
        "megatron-core, p2p_communication.py and bridge_communicator.py",
        "cost.borders:crossing_seconds",
    ),
)
STAGE = (
    Equation(
        "t and d of a stage",
        "t = sum of terms,  each term = fixed + l * per_layer + c * per_ckpt;   d the same",
        "Mist, section 5: linear in layers, so that planes of (l, c) are priced at once",
        "cost.terms:Linear",
    ),
    Equation(
        "What the traffic of a layer exposes beyond its compute, inside a run of layers",
        "overlap(compute, gather + reduce, copy in, copy out, then=collectives that wait for compute) "
        "- (compute + then)",
        "Mist, section 4 (schedule template)",
        "cost.phases:phase",
    ),
    Equation(
        "Four streams that slow each other down",
        "while streams are left: step = min_i x_i f_i(set);  x_i -= step / f_i(set);  T += step",
        "Mist, Algorithm 1",
        "price.overlap:overlapped_time",
    ),
    Equation(
        "Waiting for the host, which launches kernels ahead of the GPU",
        "pass = smooth_max(host, gpu),   host = launches * per_launch + other ranks * per_peer\n"
        "smooth_max(x, y) = (x^4 + y^4)^(1/4)",
        "fitted to published runs of vTrain (MICRO 2024)",
        "cost.stage:smooth_maximum",
    ),
    Equation(
        "A first pass whose layers step while the stage waits for its input",
        "states in + n * max(layer's step beside copies, layer's pass) + last layer",
        "Mist, section 4.2 (decoupled steps)",
        "cost.phases:steps_ahead",
    ),
    Equation(
        "A layer's share of reductions in buckets",
        "reduce_scatter(bucket) * gradient bytes / bucket",
        "Megatron-core, distributed_data_parallel_config.py; DeepSpeed, reduce_bucket_size",
        "cost.traffic:bucketed",
    ),
    Equation(
        "Boundary tensors, where stages stop for them",
        "sends per micro-batch * ((1 - share) * inside a node + share * between nodes + handed on)",
        "own; share = boundaries that lie between nodes",
        "cost.sends:sent_to_neighbours",
    ),
    Equation(
        "The step: parameters of a rank, on the GPU and on the host",
        "device_adam(share * (1 - oo)) + host_adam(share * oo),   share = parameters / dp from ZeRO 1 on",
        "ZeRO (SC'20), ZeRO-Offload (ATC'21)",
        "cost.work:StageWork",
    ),
)
MEMORY = (
    Equation(
        "States on one GPU",
        "weights = 2 n (1 - wo) / (1 + z3 (dp cp - 1)),   gradients and optimizer likewise with z2, z1",
        "ZeRO (SC'20); fractions in host memory: Mist, section 4",
        "cost.memory:stage_memory",
    ),
    Equation(
        "Kept by a layer for its backward pass",
        "s b h (34 + 5 a s / h) bytes for a GPT layer with attention scores, less by each option",
        "Korthikanti et al. (MLSys 2023), eq. 1 to 4",
        "cost.layers:saved_bytes",
    ),
    Equation(
        "Activations of a stage",
        "p ((l - c) saved (1 - ao) + c input + edges) + ao saved",
        "Mist, section 5; p = micro-batches in flight",
        "cost.memory:stage_memory",
    ),
    Equation(
        "Peak",
        "held + max over moments (forward, backward, recomputation, loss, reduction, step) of what each adds",
        "own, from frameworks' sources and measured peaks",
        "cost.memory:stage_memory",
    ),
)
INTRODUCTION = f"""# The cost model

Written by `python tests/refresh_documents.py`; a test fails when it is not current.

A plan's time and memory are expressions in the symbols below and in prices of pieces of work, as in
`gemm(m=..., n=..., k=..., batch=...)`, which a hardware profile answers. `mist-megatron explain plan.yaml`
prints, for any plan, every step of what `predict` computes: the same code runs there on numbers that record
how they are made (`cost/recorded.py`), and a test evaluates what it prints. At the end of this page is one
plan worked out that way (`recipes/{EXAMPLE}`).
"""


def located(where: str) -> str:
    """A link to the file, and the name; fails when there is none."""
    module, name = where.split(":")
    assert hasattr(importlib.import_module(f"mist_megatron.{module}"), name), where
    path = f"mist_megatron/{module.replace('.', '/')}.py"
    return f"[`{path}`](../{path}), `{name}`"


def equations(title: str, rows: Sequence[Equation]) -> str:
    parts = [f"## {title}"]
    for row in rows:
        parts.append(f"**{row.says}** ({row.source}; {located(row.where)}):")
        parts.append("\n".join(["```text", row.text, "```"]))
    return "\n\n".join(parts)


def symbols() -> str:
    rows = [f"| `{line.name}` | {line.formula} |" for line in symbol_table()]
    return "\n".join(["## Symbols", "", "| symbol | meaning |", "| --- | --- |", *rows])


def terms() -> str:
    rows = []
    for term in Term:
        of = " and ".join(part for part, trait in (("t", Traits.T), ("d", Traits.D)) if trait in term.traits)
        off = "yes" if Traits.SWITCHABLE in term.traits else ""
        rows.append(
            f"| `{term.value}` | {of} | {term.when.value} | {term.busy.value} | {off} | {term.words} |"
        )
    head = "| term | of | when | busy | `--without` | what |"
    return "\n".join(["## Terms of t and d", "", head, "| --- | --- | --- | --- | --- | --- |", *rows])


def lines(title: str, steps: Sequence[Step]) -> str:
    told = [step for step in steps if step.expression != "0"]
    text = [f"{step.name} = {step.expression}   # {step.value:.4g} {step.unit}".rstrip() for step in told]
    return "\n".join([f"### {title}", "", "```text", *text, "```"])


def example() -> Explained:
    return explain(load_plan(ROOT / "recipes" / EXAMPLE / "plan.yaml"))


def page() -> str:
    """The whole text."""
    worked = example()
    values = ", ".join(f"{name} = {value:g}" for name, value in worked.values.items())
    parts = [
        INTRODUCTION.rstrip(),
        symbols(),
        terms(),
        equations("Equations: a step", ITERATION),
        equations("Equations: a stage", STAGE),
        equations("Equations: memory", MEMORY),
        f"## One plan worked out\n\nStage 0 of `recipes/{EXAMPLE}`, prices of {worked.prices}: {values}.",
        *(lines(title.capitalize(), steps) for title, steps in worked.lines.items()),
    ]
    return "\n\n".join(parts) + "\n"
