"""The DeepSpeed patches in a conversion: what they refuse, and what they do that no JSON says. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from mist_megatron.frameworks.deepspeed.convert import Change
from mist_megatron.frameworks.deepspeed.patches import Patch, patches
from mist_megatron.frameworks.deepspeed.read import Config, Reading
from mist_megatron.frameworks.findings import Finding
from mist_megatron.spec.plan import Plan
from mist_megatron.targets.table import TARGETS, targets_of

PATCHED = tuple(name for name in targets_of("deepspeed") if TARGETS[name].patched)
"""Targets for which a file is meant for the patches."""
STEPPABLE = frozenset({"adam", "adamw"})
"""Optimizers of the JSON that DeepSpeed makes a DeepSpeedCPUAdam of where it is offloaded (engine.py,
_configure_basic_optimizer), which is what the patches step part by part."""


def patch_obstacles(reading: Reading) -> Iterator[Finding]:
    """What of a file the patches refuse when the engine is built, whatever the plan."""
    optimizer = reading.config.get("optimizer")
    if isinstance(optimizer, dict):
        kind, params = optimizer.get("type"), optimizer.get("params")
        if isinstance(kind, str) and kind.lower() not in STEPPABLE:
            yield _refused("optimizer.type", f"is {kind}; the patches step Adam and AdamW")
        if isinstance(params, dict) and params.get("torch_adam") is True:
            yield _refused("optimizer.params.torch_adam", "the patches step DeepSpeed's own Adam")
    compiled = reading.config.get("compile")
    if isinstance(compiled, dict) and compiled.get("deepcompile") is True:
        yield _refused("compile.deepcompile", "the patches do not know a compiled model")


def _refused(key: str, why: str) -> Finding:
    return Finding(level="rejected", key=key, message=f"{why} (target deepspeed takes it)")


def bare_findings(reading: Reading) -> Iterator[Finding]:
    """What to say of a file that stands alone and is meant for the patches."""
    yield from patch_obstacles(reading)
    section = reading.zero.get("offload_optimizer")
    if reading.ratio < 1.0 and reading.stage >= 1:
        yield Finding(
            level="note",
            key="zero_optimization.offload_optimizer.ratio",
            message="patches read an exact fraction from stages.json, at stage 1 to 3; convert writes both",
        )
    if isinstance(section, dict) and section.get("device") == "nvme":
        yield Finding(
            level="note",
            key="zero_optimization.offload_optimizer.device",
            message="patches need cpu here for any fraction below 1",
        )


def fit_to_patches(config: Config, tuned: Plan) -> Config:
    """A tuned file as its patches want it: a fraction of the optimizer needs plain CPU memory."""
    section = config["zero_optimization"]
    moved = section.get("offload_optimizer")
    if (
        Patch.OPTIMIZER_FRACTION in patches(tuned)
        and isinstance(moved, dict)
        and moved.get("device") == "nvme"
    ):
        kept = {key: value for key, value in moved.items() if not key.startswith("nvme")}
        section = {**section, "offload_optimizer": {**kept, "device": "cpu"}}
    return {**config, "zero_optimization": section}


def patch_changes(tuned: Plan) -> tuple[Change, ...]:
    """One line per patch, with what it does; what they save together is the price without them."""
    stage = tuned.stages[0]
    offload = stage.offload
    said: dict[Patch, tuple[object, str]] = {
        Patch.OPTIMIZER_FRACTION: (
            offload.optimizer,
            "of the optimizer in host memory; the JSON knows all or none",
        ),
        Patch.WEIGHT_FRACTION: (
            offload.weights,
            "of the weights in host memory; the JSON knows all, at stage 3",
        ),
        Patch.GRADIENT_FRACTION: (
            offload.grads,
            "of the gradients in host memory; the JSON has no key for it",
        ),
        Patch.LAYER_ACTIVATIONS: (
            {"recompute_layers": stage.ckpt, "activations": offload.activations},
            "layers recomputed, and the part of the others' activations in host memory; no key at all",
        ),
        Patch.DECOUPLED_STEPS: (True, "each layer is stepped right before its next forward pass"),
        Patch.FORGET_OVERFLOW: (True, "a skipped fp16 step does not make DeepSpeed skip those after it"),
    }
    return tuple(
        Change(key=f"stages.json: {name}", old=None, new=said[name][0], reason=said[name][1], gain=None)
        for name in patches(tuned)
    )
