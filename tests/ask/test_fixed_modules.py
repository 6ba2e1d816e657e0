"""Megatron offload of modules, as users ask for it: what is found can be written and run."""

from __future__ import annotations

from pathlib import Path

import pytest

import mist_megatron as mm


@pytest.mark.parametrize(
    ("model", "modules"), [("llama3-8b", "core_attn+attn_proj"), ("deepseek-v2-lite", "moe_act")]
)
def test_modules_asked_to_leave_are_in_plans_that_run(model: str, modules: str, tmp_path: Path) -> None:
    """Recomputed layers and graphs of attention exclude them, which the fastest plans often have."""
    fixed = f"pp=1,tp=1,micro_batch=1,offload_modules={modules}"
    found = mm.tune(model=model, gpus=8, gpu="h100-sxm-80gb", fix=fixed, out=tmp_path / "run")
    assert found.plan.execution.offload_modules == tuple(modules.split("+"))
    assert not any(stage.ckpt for stage in found.plan.stages)
    assert "--fine-grained-activation-offloading" in (tmp_path / "run" / "args.sh").read_text()
    refused = (
        "offload_modules=attn_proj" if "core_attn" in modules else "offload_modules=moe_act,recompute=full"
    )
    with pytest.raises(mm.MistError, match=r"needs core_attn|excludes recomputation|has no such way|no plan"):
        mm.tune(model=model, gpus=8, gpu="h100-sxm-80gb", fix=f"pp=1,tp=1,micro_batch=1,{refused}")
