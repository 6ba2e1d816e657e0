"""Random valid plans."""

from __future__ import annotations

from hypothesis import strategies as st

from mist_megatron.formats.model_yaml import model_from_mapping
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import TARGET_NAMES, Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.training import TrainingSpec

FRACTION = st.one_of(st.just(0.0), st.floats(0.0, 1.0))


def sequences(model: ModelSpec) -> st.SearchStrategy[int]:
    """Lengths that samples of a model may have."""
    if model.tokens is not None:
        return st.just(model.tokens)
    given = [
        kind.entry.tokens // kind.entry.merged for kind in model.kinds if kind.entry and kind.entry.tokens
    ]
    chunks = [kind.chunk for kind in model.kinds if kind.chunk is not None]
    return st.integers(max(given, default=1), min(chunks, default=1 << 17))


@st.composite
def valid_plans(draw) -> Plan:
    stages = draw(st.integers(1, 4))
    tp = draw(st.sampled_from([1, 2, 4]))
    dp = draw(st.sampled_from([1, 2, 4]))
    micro_batch = draw(st.integers(1, 4))
    grad_accum = draw(st.integers(1, 6))
    counts = [draw(st.integers(1, 5)) for _ in range(stages)]
    if draw(st.booleans()):
        model = draw(
            st.sampled_from([m for m in PRESETS.values() if m.heads % 4 == 0 and m.kv_heads % 4 == 0])
        )
        counts = [model.layers // stages + (k < model.layers % stages) for k in range(stages)]
    else:
        model = model_from_mapping(
            {"family": "llama", "layers": sum(counts), "hidden": 256, "heads": 8, "vocab": 1000}, "model"
        )
    made = tuple(
        StagePlan(
            layers=count,
            nodes=1,
            gpus_per_node=tp * dp,
            dp=dp,
            tp=tp,
            micro_batch=micro_batch,
            zero=draw(st.sampled_from([0, 1, 2, 3])),
            ckpt=draw(st.integers(0, count)),
            recompute=draw(st.sampled_from(["full", "selective"])),
            offload=Offload(
                weights=draw(FRACTION),
                grads=draw(FRACTION),
                optimizer=draw(FRACTION),
                activations=draw(FRACTION),
            ),
        )
        for count in counts
    )
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=micro_batch * dp * grad_accum,
            seq_len=draw(sequences(model)),
            precision=draw(st.sampled_from(["fp16", "bf16", "fp8"])),
            flash_attention=draw(st.booleans()),
            dropout=draw(st.floats(0.0, 0.9)),
        ),
        cluster=ClusterSpec(
            gpu=draw(st.sampled_from(list(CATALOGUE.values()))),
            nodes=stages,
            gpus_per_node=tp * dp,
            links=draw(st.sampled_from([LinkOverrides(), LinkOverrides(inter_bytes_per_s=1.25e10)])),
            memory_limit_bytes=draw(st.one_of(st.none(), st.floats(1e9, 1e11))),
        ),
        target=draw(st.sampled_from(list(TARGET_NAMES))),
        grad_accum=grad_accum,
        stages=made,
        # Without it Megatron trains no experts on several tensor-parallel ranks.
        sequence_parallel=any(kind.experts for kind in model.kinds) or draw(st.booleans()),
        execution=draw(st.sampled_from([Execution(), Execution(grad_bytes=2, overlap_grad_reduce=True)])),
        rank_map=draw(st.one_of(st.none(), st.permutations(range(stages * tp * dp)).map(tuple))),
        provenance=draw(st.one_of(st.none(), st.just({"gap": 0.0, "space": "mist", "n": [1, 2]}))),
    )
