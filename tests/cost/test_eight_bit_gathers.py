"""Updated weights that travel in the 8 bits that products read: by how much their gathers are shorter."""

from __future__ import annotations

import pytest

from mist_megatron.ask.evaluators import evaluator_for
from mist_megatron.cost.predict import job_of, predict
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import cluster_of
from mist_megatron.spec.plan import Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.term import Term
from mist_megatron.spec.training import TrainingSpec


def plan(model: str = "llama3-8b", ep: int = 1, zero: int = 1, **execution) -> Plan:
    kinds = PRESETS[model].layers
    stage = StagePlan(layers=kinds, nodes=1, gpus_per_node=8, dp=8, tp=1, micro_batch=1, zero=zero)
    return Plan(
        model=PRESETS[model],
        training=TrainingSpec(global_batch=64, seq_len=4096, precision="fp8"),
        cluster=cluster_of(CATALOGUE["gb200-186gb"], 8, 8),
        target="megatron",
        grad_accum=8,
        stages=(stage,),
        execution=Execution(expert_parallel=ep, overlap_param_gather=zero == 3, **execution),
    )


def gather_s(made: Plan) -> float:
    (stage,) = predict(made, evaluator_for(job_of(made))[0]).stages
    return stage.delta_terms_s[Term.WEIGHT_GATHER]


def part_saved(made: Plan) -> float:
    """Of the gathers' time, what 8 bits save."""
    return 1.0 - gather_s(plan(**made)) / gather_s(plan(**{**made, "fp8_param_gather": None}))


MATRICES = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
"""Of Llama 3 8B; its embedding, head and norms stay as they are."""


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_matrices_travel_in_half_the_bytes(recipe: str) -> None:
    asked = {"quantization": recipe, "fp8_param_gather": True}
    elements = PRESETS["llama3-8b"].parameters
    assert part_saved(asked) == pytest.approx(MATRICES / (2 * elements), rel=1e-9)


def test_those_of_mxfp8_travel_in_16_bits() -> None:
    """Through the buffer of gradients (--reuse-grad-buf-for-mxfp8-param-ag)."""
    assert part_saved({"quantization": "mxfp8", "fp8_param_gather": True}) == 0.0


@pytest.mark.parametrize("ep", [1, 8])
def test_those_of_experts_too(ep: int) -> None:
    """Where each rank has experts of its own nothing of these is gathered; the router is not cast."""
    asked = {"quantization": "tensorwise", "model": "qwen3-30b-a3b", "ep": ep, "fp8_param_gather": True}
    model = PRESETS["qwen3-30b-a3b"]
    kind, experts = model.kinds[0], 48 * 128 * 3 * 2048 * 768
    attention = 48 * kind.hidden * (2 * kind.query_width + 2 * kind.kv_width)
    narrow, elements = attention + experts * (ep == 1), model.parameters - experts * (ep == 8)
    assert part_saved(asked) == pytest.approx(narrow / (2 * elements), rel=1e-9)
    assert part_saved({**asked, "quantization": "mxfp8"}) == 0.0


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_megatron_fsdp_gathers_what_products_read(recipe: str) -> None:
    """In every pass, a layer's weights before it: MXFP8 too, of which either pass reads another copy."""
    asked = {"quantization": recipe, "megatron_fsdp": True, "zero": 3}
    usual, less = (plan(**asked, fp8_param_gather=said) for said in (None, True))
    usual_s, less_s = (predict(made, evaluator_for(job_of(made))[0]).time.total_s for made in (usual, less))
    assert less_s < usual_s
