"""Plans drawn at random from all that targets can run: a plain one, and changes to it that leave it legal."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from mist_megatron.errors import MistError
from mist_megatron.spec.catalogue import CATALOGUE
from mist_megatron.spec.cluster import ClusterSpec, LinkOverrides
from mist_megatron.spec.kinds import CONTEXT_EXCHANGES, DISPATCHERS, RECIPES, Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.offloaded import OFFLOAD_MODULES
from mist_megatron.spec.plan import TARGET_NAMES, Execution, Plan, StagePlan
from mist_megatron.spec.presets import PRESETS
from mist_megatron.spec.recompute import MODULES
from mist_megatron.spec.training import TrainingSpec
from mist_megatron.targets.rules import violations

Change = Callable[[Plan, random.Random], Plan]
DENSE = (
    "gpt3-1.3b", "llama-7b", "falcon-7b", "falcon-40b", "gpt2-medium", "qwen2.5-7b", "llama3-8b", "phi4",
    "gemma-2-9b", "qwen3-8b", "bert-huge-32", "llama3-70b", "mistral-7b",
)  # fmt: skip
MIXTURES = (
    "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v2-lite", "moonlight-16b-a3b", "glm-4.5-air",
    "llama-4-scout-17b-16e", "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "deepseek-v3",
)  # fmt: skip
SEVERAL_WIDTHS = (
    "t5-512/4-32",
    "swin-huge-32",
    "vit-huge-32",
    "qwen2.5-vl-7b-frozen-vision",
    "llava-1.5-13b",
)
"""Models that torch runs in stages, and DeepSpeed."""
GPUS = (
    "a100-sxm-40gb", "a100-sxm-80gb", "l4-24gb", "h100-sxm-80gb", "b200-sxm-180gb", "gb200-186gb",
    "mi300x-192gb", "v100-sxm-32gb", "h200-sxm-141gb",
)  # fmt: skip
FRACTIONS = (0.0, 0.25, 0.5, 1.0)
PROPOSED = 24
"""Changes of each plan, of which some are refused."""


def legal_plans(seed: int, count: int) -> Iterator[Plan]:
    """The first so many of a seed."""
    rng = random.Random(seed)
    while count:
        plan = _tried(lambda: _plain(rng))
        if plan is None:
            continue
        for _ in range(PROPOSED):
            change = rng.choice(CHANGES)
            plan = _tried(lambda plan=plan, change=change: change(plan, rng)) or plan
        count -= 1
        yield plan


def _tried(make: Callable[[], Plan]) -> Plan | None:
    try:
        plan = make()
        return None if violations(plan) else plan
    except MistError:
        return None


def _plain(rng: random.Random) -> Plan:
    """No switch is set. Few layers: an event of each takes time, and says the same again."""
    target = rng.choice(("megatron", "megatron", "torch", "torch", *TARGET_NAMES))
    name = rng.choice(MIXTURES if target == "megatron" and rng.random() < 0.5 else DENSE)
    if target in ("torch", "deepspeed") and rng.random() < 0.7:
        name = rng.choice(SEVERAL_WIDTHS)
    count, tp, cp = rng.choice((1, 1, 2, 2, 3, 4)), rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 1, 2, 4))
    if target.startswith("deepspeed"):
        count, tp, cp = count if target.endswith("patches") else 1, 1, 1
    cp = 1 if target == "torch" else cp
    dp, micro_batch = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 3))
    wide = tp * dp * cp
    model = _shorter(PRESETS[name], count * rng.choice((1, 2, 3)))
    cluster = ClusterSpec(
        gpu=CATALOGUE[rng.choice(GPUS)],
        nodes=count if wide > 2 or rng.random() < 0.3 else 1,
        gpus_per_node=wide if wide > 2 else wide * count,
    )
    if cluster.gpus != wide * count:
        cluster = replace(cluster, nodes=count, gpus_per_node=wide)
    grad_accum = rng.choice((1, 2, 3, 4, 2 * count, 4 * count))
    stage = StagePlan(
        layers=model.layers // count,
        nodes=1,
        gpus_per_node=wide,
        dp=dp,
        tp=tp,
        micro_batch=micro_batch,
        zero=0 if target == "torch" else 1,
    )
    return Plan(
        model=model,
        training=TrainingSpec(
            global_batch=micro_batch * dp * grad_accum,
            seq_len=rng.choice((1024, 2048, 4096)),
            precision=rng.choice(("fp16", "bf16", "bf16", "fp8")),
        ),
        cluster=cluster,
        target=target,
        grad_accum=grad_accum,
        stages=(stage,) * count,
        sequence_parallel=tp > 1 and model.experts is not None,
        execution=Execution(context_parallel=cp),
    )


def _shorter(model: ModelSpec, layers: int) -> ModelSpec:
    """Layers in turn stay so: of a model whose kinds stand in a list, as many as come to all of them."""
    try:
        return replace(model, layers=layers)
    except MistError:
        return model


def _switch(**values: tuple[Any, ...]) -> Change:
    """One of the values of one of the keys of `execution`."""

    def changed(plan: Plan, rng: random.Random) -> Plan:
        key = rng.choice(list(values))
        return replace(plan, execution=replace(plan.execution, **{key: rng.choice(values[key])}))

    return changed


def _stages(change: Callable[[StagePlan, random.Random], StagePlan]) -> Change:
    """Of all stages alike, or of each its own."""

    def changed(plan: Plan, rng: random.Random) -> Plan:
        if rng.random() < 0.5:
            state = rng.getrandbits(32)
            return replace(plan, stages=tuple(change(stage, random.Random(state)) for stage in plan.stages))
        return replace(plan, stages=tuple(change(stage, rng) for stage in plan.stages))

    return changed


def _recomputed(stage: StagePlan, rng: random.Random) -> StagePlan:
    kind = rng.choice(("full", "full", "selective", "none"))
    ckpt = rng.choice((0, stage.layers, rng.randint(0, stage.layers)))
    return replace(stage, recompute=kind, ckpt=ckpt if kind == "full" else 0)


def _offloaded(stage: StagePlan, rng: random.Random) -> StagePlan:
    kinds = {kind: rng.choice(FRACTIONS) if rng.random() < 0.5 else 0.0 for kind in Offload().__dict__}
    return replace(stage, offload=Offload(**kinds))


def _one_layer_moves(plan: Plan, rng: random.Random) -> Plan:
    giver, taker = rng.randrange(len(plan.stages)), rng.randrange(len(plan.stages))
    stages = list(plan.stages)
    stages[giver] = replace(stages[giver], layers=stages[giver].layers - 1)
    stages[taker] = replace(stages[taker], layers=stages[taker].layers + 1)
    return replace(plan, stages=tuple(stages))


def _other_grid(plan: Plan, rng: random.Random) -> Plan:
    """Of one stage: its tensor parallelism against its replicas."""
    index = rng.randrange(len(plan.stages))
    stages, stage = list(plan.stages), plan.stages[index]
    if stage.dp % 2 == 0:
        stages[index] = replace(stage, dp=stage.dp // 2, tp=stage.tp * 2, micro_batch=stage.micro_batch * 2)
    return replace(plan, stages=tuple(stages))


def _interleaved(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, schedule="interleaved", vpp=rng.choice((2, 3)))


def _schedule(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, schedule=rng.choice(("gpipe", "1f1b")), vpp=1)


def _training(plan: Plan, rng: random.Random) -> Plan:
    key, values = rng.choice(
        (("precision", ("bf16", "fp8")), ("flash_attention", (False,)), ("dropout", (0.1,)))
    )
    return replace(plan, training=replace(plan.training, **{key: rng.choice(values)}))


def _links(plan: Plan, rng: random.Random) -> Plan:
    links = LinkOverrides(inter_bytes_per_s=10.0 ** rng.uniform(8.5, 11.0))
    return replace(plan, cluster=replace(plan.cluster, links=links))


def _tokens_split(plan: Plan, rng: random.Random) -> Plan:
    return replace(plan, sequence_parallel=not plan.sequence_parallel)


def _modules(plan: Plan, rng: random.Random) -> Plan:
    """Some modules run again, or leave for host memory."""
    key, known = rng.choice((("recompute_modules", MODULES), ("offload_modules", OFFLOAD_MODULES)))
    chosen = tuple(sorted(rng.sample(known, rng.randint(1, 3)), key=known.index))
    stages = plan.stages
    if key == "recompute_modules":
        stages = tuple(replace(stage, recompute="selective", ckpt=0) for stage in stages)
    return replace(plan, stages=stages, execution=replace(plan.execution, **{key: chosen}))


def _rings_of_heads(plan: Plan, rng: random.Random) -> Plan:
    execution = replace(plan.execution, context_exchange="a2a+p2p", context_inner=2)
    return replace(plan, execution=execution)


def _second_copies(plan: Plan, rng: random.Random) -> Plan:
    """Which weights shared out by DeepSpeed alone have."""
    stages = tuple(replace(stage, zero=3) for stage in plan.stages)
    return replace(plan, stages=stages, execution=replace(plan.execution, hpz_size=2))


def _sharded(plan: Plan, rng: random.Random) -> Plan:
    """Megatron-FSDP wants its switches together."""
    execution = replace(
        plan.execution, megatron_fsdp=True, overlap_grad_reduce=True, overlap_param_gather=rng.random() < 0.7
    )
    return replace(plan, execution=execution)


EITHER = (True, False)
CHANGES: tuple[Change, ...] = (
    _stages(_recomputed),
    _stages(_recomputed),
    _stages(_offloaded),
    _stages(_offloaded),
    _stages(lambda stage, rng: replace(stage, zero=rng.choice((0, 1, 2, 3)))),
    _one_layer_moves,
    _other_grid,
    _interleaved,
    _schedule,
    _training,
    _links,
    _tokens_split,
    _modules,
    _rings_of_heads,
    _second_copies,
    _sharded,
    _switch(overlap_grad_reduce=EITHER, overlap_param_gather=EITHER, tp_comm_overlap=EITHER),
    _switch(fused_cross_entropy=EITHER, decoupled_step=EITHER, deterministic=EITHER, grad_bytes=(2, 4)),
    _switch(expert_parallel=(2, 4, 8), expert_tensor_parallel=(1, 2), expert_dispatcher=DISPATCHERS),
    _switch(expert_parallel=(2, 4, 8)),
    _switch(expert_imbalance=(1.2,), expert_overlap=EITHER, shared_expert_overlap=EITHER),
    _switch(delayed_weight_grad=EITHER, cuda_graphs=(("attn",), ("layer",), ("full_iteration",))),
    _switch(context_exchange=CONTEXT_EXCHANGES),
    _switch(quantization=tuple(sorted(set(RECIPES.values()))), fp8_param_gather=EITHER),
    _switch(optimizer_bytes=(6, 8, 12), optimizer_instances=(2,), outer_sharding=EITHER),
    _switch(zero3=("deepspeed", "deepspeed-2021", "fsdp"), scattered_boundaries=EITHER),
)  # fmt: skip
