"""A hand-written DeepSpeed configuration -> a tuned one that can take its place, and what changed. Pure.

The user's optimizer, scheduler, clipping and precision stay; batch split, ZeRO stage, offload and
recomputation are what is tuned. The price of a plan is a function handed in: this room knows no costs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import cast

from mist_megatron.errors import InputError
from mist_megatron.frameworks.deepspeed.read import BATCH_KEYS, HPZ_KEY, Config, Reading
from mist_megatron.frameworks.deepspeed.schema import DeepSpeedSchema
from mist_megatron.frameworks.deepspeed.write import zero_section
from mist_megatron.spec.cluster import ClusterSpec
from mist_megatron.spec.kinds import Offload
from mist_megatron.spec.model import ModelSpec
from mist_megatron.spec.plan import Execution, Plan, StagePlan, TargetName, Zero
from mist_megatron.spec.training import Precision, TrainingSpec
from mist_megatron.targets.deepspeed import copy_sizes
from mist_megatron.targets.rules import violations
from mist_megatron.targets.table import TARGETS

TRAINER_MICRO_BATCH = 8
"""Hugging Face TrainingArguments' default per_device_train_batch_size, which "auto" stands for."""

MOST_SEQUENCES = 1_000_000_000
"""Of a batch: far beyond any that is trained with, and every figure made from it stays exact."""

LEVELS: tuple[tuple[Zero, Offload], ...] = (
    (0, Offload()),
    (1, Offload()),
    (2, Offload()),
    (3, Offload()),
    (1, Offload(optimizer=1.0)),
    (2, Offload(optimizer=1.0, grads=1.0)),
    (3, Offload(optimizer=1.0, grads=1.0)),
    (3, Offload(optimizer=1.0, grads=1.0, weights=1.0)),
    (3, Offload(weights=1.0)),
)
"""Everything that DeepSpeed's JSON can say about where states live."""

GROUPS: Mapping[str, tuple[str, ...]] = {
    "batch split": BATCH_KEYS,
    "ZeRO stage and offload": ("zero_optimization",),
}


@dataclass(frozen=True, kw_only=True)
class Price:
    """What a plan costs; the search needs no more."""

    iteration_s: float
    fits: bool
    memory_used_fraction: float


@dataclass(frozen=True, kw_only=True)
class Change:
    """One line of the diff."""

    key: str
    old: object
    new: object
    reason: str
    gain: float | None
    """Time saved by this change as a fraction of the time without it; None where it changes no time, or where
    the plan without it does not fit."""
    needed: bool = False
    """Without it the tuned plan does not fit in memory."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a trainer puts in the place of "auto"; None where nobody said."""

    total: int | None = None
    micro: int | None = None
    steps: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """By the options of `convert`, in the order of BATCH_KEYS."""
        return {"--global-batch": self.total, "--per-device-batch": self.micro, "--grad-accum": self.steps}


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is not in the JSON and must be known to price it."""

    model: ModelSpec
    cluster: ClusterSpec
    training: TrainingSpec
    checkpointing: bool
    """Whether the script recomputes activations now."""
    may_checkpoint: bool
    """Whether the answer may switch recomputation."""
    target: TargetName = "deepspeed"
    batch: Batch = Batch()


BATCH_MISSING = "missing, as train_micro_batch_size_per_gpu is: DeepSpeed needs one of them"


def says_no_batch(reading: Reading, asked: Batch) -> bool:
    """Whether DeepSpeed would stop for want of a batch (runtime/config.py, _set_batch_related_parameters);
    "auto" is an answer, which a trainer gives."""
    return not {BATCH_KEYS[0], BATCH_KEYS[1]} & reading.config.keys() and asked.total is asked.micro is None


def batch_of(reading: Reading, gpus: int, asked: Batch = Batch()) -> tuple[int, int]:
    """Micro-batch and accumulation steps as DeepSpeed derives them; what the file leaves open ("auto") as
    `asked`, else as Trainer does."""
    if says_no_batch(reading, asked):
        raise InputError(
            f"{BATCH_KEYS[0]} is {BATCH_MISSING}",
            details=("try: --global-batch 64, what your script fills in", f'or "{BATCH_KEYS[1]}": "auto"'),
        )
    written = [_count(reading.config.get(key), key) for key in BATCH_KEYS]
    for key, number, (option, said) in zip(BATCH_KEYS, written, asked.options.items(), strict=True):
        if number is not None and said is not None and number != said:
            raise InputError(
                f"{option} is {said}; the file says {key} {number}",
                details=(f"try: without {option}, or change the file",),
            )
    open_total = written[0] is None
    total, micro, steps = (
        number if number is not None else said
        for number, said in zip(written, asked.options.values(), strict=True)
    )
    if total is not None and micro is None and steps is None:
        steps = None if open_total else 1
    if open_total and total is not None and micro is None and steps is None:
        micro = _usual_part(total, gpus)
    if micro is None:
        micro = total // (gpus * (steps or 1)) if total is not None else TRAINER_MICRO_BATCH
    if steps is None:
        steps = total // (gpus * micro) if total is not None else 1
    if micro < 1 or steps < 1 or (total is not None and total != micro * steps * gpus):
        whose = "--global-batch" if open_total else "train_batch_size"
        raise InputError(
            f"{whose} {total} is not micro-batch {micro} * accumulation {steps} * {gpus} GPUs",
            details=("DeepSpeed rejects this file on that many GPUs", "try: another --gpus"),
        )
    return micro, steps


def taken_for_auto(reading: Reading, gpus: int, asked: Batch = Batch()) -> dict[str, str]:
    """What stands for sizes that the file leaves to a trainer and nobody said."""
    sizes = zip(BATCH_KEYS[1:], batch_of(reading, gpus, asked), (asked.micro, asked.steps), strict=True)
    return {
        key: f'{size} for "auto"'
        for key, size, said in sizes
        if reading.config.get(key) == "auto" and said is None
    }


def _usual_part(total: int, gpus: int) -> int:
    """Of a batch that nobody split: Trainer's own micro-batch, or the next smaller one that divides."""
    per_gpu = total // gpus
    return next((size for size in range(TRAINER_MICRO_BATCH, 0, -1) if per_gpu % size == 0), 1)


def _count(value: object, key: str) -> int | None:
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{key} is {value!r}; wanted a whole number above 0, or auto")
    if value > MOST_SEQUENCES:
        raise InputError(f"{key} is {value}; wanted at most {MOST_SEQUENCES}")
    return value


def precision_of(reading: Reading) -> Precision | None:
    """What the file switches on; None where it leaves that to the trainer."""
    for key in ("bf16", "fp16"):
        section = reading.config.get(key)
        if isinstance(section, dict) and section.get("enabled") is True:
            return "bf16" if key == "bf16" else "fp16"
    return None


def as_written(reading: Reading, question: Question) -> Plan:
    """The plan that DeepSpeed would run, with everything that it ignores left out; with patches, a `ratio` is
    the exact fraction that they would make of it."""
    gpus = question.cluster.gpus
    micro, steps = batch_of(reading, gpus, question.batch)
    level = reading.stage
    if level not in {0, 1, 2, 3}:
        raise InputError(f"zero_optimization.stage is {level}; wanted 0, 1, 2 or 3")
    patched = TARGETS[question.target].patched
    wide = patched and reading.wide_grads
    states = reading.moves("offload_optimizer") and level >= 1
    offload = Offload(
        optimizer=(reading.ratio if patched else 1.0) if states else 0.0,
        grads=1.0 if states and level >= 2 and not (wide and level == 2) else 0.0,
        weights=1.0 if reading.moves("offload_param") and level == 3 else 0.0,
    )
    overlap, size = reading.zero.get("overlap_comm"), reading.hpz_size
    if size is not None and gpus % min(size, gpus):
        raise InputError(
            f"zero_optimization.zero_hpz_partition_size is {size}; wanted a divisor of {gpus} GPUs",
            details=("DeepSpeed rejects this file on that many GPUs",),
        )
    layers = question.model.layers
    return Plan(
        model=question.model,
        training=replace(question.training, global_batch=micro * steps * gpus),
        cluster=question.cluster,
        target=question.target,
        grad_accum=steps,
        execution=Execution(
            overlap_grad_reduce=overlap if isinstance(overlap, bool) else None,
            grad_bytes=4 if wide else None,
            hpz_size=None if size is None else min(size, gpus),
        ),
        stages=(
            StagePlan(
                layers=layers,
                nodes=question.cluster.nodes,
                gpus_per_node=question.cluster.gpus_per_node,
                dp=gpus,
                tp=1,
                micro_batch=micro,
                zero=cast(Zero, level),
                ckpt=layers if question.checkpointing else 0,
                offload=offload,
            ),
        ),
    )


def candidates(plan: Plan, *, may_checkpoint: bool) -> Iterator[Plan]:
    """Every plan with the same global batch that the JSON can say: a space small enough to try whole."""
    gpus, layers = plan.gpus, plan.model.layers
    per_gpu = plan.training.global_batch // gpus
    choices = {0, layers} if may_checkpoint else {plan.stages[0].ckpt}
    for micro in (m for m in range(1, per_gpu + 1) if per_gpu % m == 0):
        for level, offload in LEVELS:
            for ckpt, size in product(sorted(choices), _copy_sizes(plan) if level == 3 else (None,)):
                stage = replace(plan.stages[0], micro_batch=micro, zero=level, offload=offload, ckpt=ckpt)
                execution = replace(plan.execution, hpz_size=size)
                made = replace(plan, stages=(stage,), grad_accum=per_gpu // micro, execution=execution)
                if not violations(made):
                    yield made


def _copy_sizes(plan: Plan) -> tuple[int | None, ...]:
    """Ranks that may share out a second copy of weights: as the file says; on several nodes any number."""
    several = copy_sizes(plan.gpus, plan.cluster.linked_gpus) if plan.gpus > plan.cluster.linked_gpus else ()
    return tuple(dict.fromkeys((None, plan.execution.hpz_size, *several)))


def best(plans: Iterator[Plan], price: Callable[[Plan], Price]) -> tuple[Plan, Price] | None:
    """The fastest that fits; of equals the one with more memory to spare."""
    priced = [(plan, price(plan)) for plan in plans]
    fitting = [(plan, cost) for plan, cost in priced if cost.fits]
    if not fitting:
        return None
    return min(fitting, key=lambda item: (item[1].iteration_s, item[1].memory_used_fraction))


def replacement(reading: Reading, tuned: Plan, schema: DeepSpeedSchema, keep: tuple[str, ...]) -> Config:
    """The user's file with the tuned values in it, less what DeepSpeed rejects or ignores."""
    config = copy.deepcopy(reading.config)
    for finding in reading.findings:
        if finding.level in {"rejected", "ignored"} and finding.key not in BATCH_KEYS:
            _drop(config, finding.key)
    written_auto = [config.get(key) == "auto" for key in BATCH_KEYS]
    values = (tuned.training.global_batch, tuned.stages[0].micro_batch, tuned.grad_accum)
    for key, value, auto in zip(BATCH_KEYS, values, written_auto, strict=True):
        if not auto:
            config[key] = value
    if written_auto[1] or written_auto[2]:
        config.pop("train_batch_size", None)  # a trainer that fills in the parts contradicts a written sum
    old = config.get("zero_optimization")
    config["zero_optimization"] = _zero(old if isinstance(old, dict) else {}, tuned, schema)
    for path in keep:
        _restore(config, reading.config, path)
    return config


_DECIDED = frozenset({"stage", "offload_optimizer", "offload_param", HPZ_KEY})
"""Keys of the section that a plan says."""


def _zero(old: Config, tuned: Plan, schema: DeepSpeedSchema) -> Config:
    """The tuned section, with the user's own numbers where they still act (bucket sizes, thresholds)."""
    section = zero_section(tuned)
    known = schema.sections["zero_optimization"]
    for key, value in old.items():
        decided = key in _DECIDED or key not in known
        if not decided and (key in section or not key.startswith(("stage3_", "sub_group"))):
            section[key] = value
    for key in ("offload_optimizer", "offload_param"):
        if key in section and isinstance(old.get(key), dict) and old[key].get("device") in {"cpu", "nvme"}:
            section[key] = {**section[key], **{k: v for k, v in old[key].items() if k != "ratio"}}
    return section


def _drop(config: Config, path: str) -> None:
    *parents, last = path.split(".")
    place: object = config
    for part in parents:
        place = place.get(part) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place.pop(last, None)


def keepable(reading: Reading, schema: DeepSpeedSchema) -> set[str]:
    """Every key that can be kept: those that DeepSpeed knows, and whatever the file holds."""
    known = {f"{name}.{key}" for name, keys in schema.sections.items() for key in keys}
    paths = known | set(flat(reading.config)) | schema.top_level
    return {".".join(path.split(".")[: k + 1]) for path in paths for k in range(path.count(".") + 1)}


def _restore(config: Config, original: Config, path: str) -> None:
    """Put a kept key back as it was; a kept key that was not there is left out."""
    *parents, last = path.split(".")
    source: object = original
    place = config
    for part in parents:
        source = source.get(part) if isinstance(source, dict) else None
        place = place.setdefault(part, {})
    if isinstance(source, dict) and last in source:
        place[last] = copy.deepcopy(source[last])
    else:
        place.pop(last, None)


def flat(config: Config, prefix: str = "") -> dict[str, object]:
    """Dotted path -> value; provenance left out."""
    leaves: dict[str, object] = {}
    for key, value in config.items():
        if key == "_mist":
            continue
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{path}.")
        else:
            leaves[path] = value
    return leaves


def changes(
    raw: Config, new: Config, reading: Reading, gains: Mapping[str, float | None]
) -> tuple[Change, ...]:
    """What differs, each with one reason and with the gain of the group it belongs to; `gains` has the groups
    that the tuned plan decides otherwise than the file."""
    said = {finding.key: finding.message for finding in reading.findings}
    before, after = flat(raw), flat(new)
    changed = []
    for key in [*after, *(key for key in before if key not in after)]:
        old, now = before.get(key), after.get(key)
        if old == now and type(old) is type(now):
            continue
        group = next((g for g, keys in GROUPS.items() if key.split(".")[0] in keys), None)
        moved = group if group in gains else None
        reason = said.get(key) or said.get(key.split(".")[0]) or _reason(key, old, now, moved)
        decided = key in BATCH_KEYS or key.endswith((".stage", HPZ_KEY)) or ".offload_" in key
        spelled = key in BATCH_KEYS and (old is None or now is None)
        tuned = group in gains and decided and key not in said and not spelled
        gain = gains[str(group)] if tuned else None
        needed = tuned and gain is None
        changed.append(Change(key=key, old=old, new=now, reason=reason, gain=gain, needed=needed))
    return tuple(changed)


WRITTEN_OUT = "written out, so that it is the same under every version"
"""Why a key that the file left out stands in the new one."""


def _reason(key: str, old: object, now: object, group: str | None) -> str:
    if key in BATCH_KEYS and old is None:
        return "written out: follows from the other two"
    if key in BATCH_KEYS and now is None:
        return "left to the trainer, which multiplies the other two"
    if not group and key in BATCH_KEYS:
        return "as DeepSpeed derives it from the others"
    if key.endswith(".stage3_gather_16bit_weights_on_model_save") and now is not None:
        return "so that saving a model gives whole 16-bit weights"
    if key.endswith(HPZ_KEY):
        return f"tuned: {group}" if group else "written out"
    if ".offload_" in key and (old is None or now is None):
        return f"tuned: {group}" if now is not None else "left out: nothing of it is in host memory now"
    if old is None:
        return WRITTEN_OUT
    if now is None:
        return f"does nothing under the tuned {group}" if group else "does nothing here"
    return f"tuned: {group}" if group else "the same in today's spelling"
