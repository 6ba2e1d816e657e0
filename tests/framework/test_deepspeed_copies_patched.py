"""Patches beside second copies of weights (hpZ), on four ranks: the same training as without either."""

from __future__ import annotations

from dataclasses import replace

import pytest
from short_form import long_form

pytest.importorskip("torch")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
from deepspeed_cases import FULL, SETS, Z3, Z3_HOST, require_equal, require_shares, results, with_patches

ACTIVATIONS = {"recomputed": 2, "fraction": 0.5}
CASES = {
    "states": with_patches(
        replace(Z3_HOST, copies=2, by_file=True, precision="bf16", **FULL),
        optimizer_fraction=0.4,
        gradient_fraction=0.6,
        activations=ACTIVATIONS,
    ),
    "gradients": with_patches(replace(Z3, copies=2, **FULL), gradient_fraction=0.5, activations=ACTIVATIONS),
}
SETS["copies"] = (4, CASES)


@long_form
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same(name: str) -> None:
    runs = results("copies")[name]
    for run, reference in runs:
        require_equal(CASES[name], run, reference)
    require_shares(CASES[name], [run for run, _ in runs])
