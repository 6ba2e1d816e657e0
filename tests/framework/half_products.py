"""Matrix products in half precision as GPUs make them: summed in fp32 and rounded once.

Without instructions for it a processor took up to 25 times as long for a product of bfloat16 as for one
of fp32, and most of what a tiny model trains for in bfloat16 goes into that.
"""

from __future__ import annotations

import warnings
from typing import Any

HALF = ("bfloat16", "float16")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""What linear layers, attention and their gradients come to."""


def install() -> Any:
    """For this process, as long as what is returned is kept."""
    import torch

    kinds, to = {getattr(torch, name) for name in HALF}, torch.Tensor.to
    library = torch.library.Library("aten", "IMPL")

    def summed_in_fp32(name: str) -> None:
        kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

        def product(keys: Any, *factors: Any, **more: Any) -> Any:
            kind = factors[0].dtype
            if kind not in kinds:
                return kernel.call_boxed(keys, *factors, **more)
            wide = (to(factor, torch.float32) for factor in factors)
            return to(kernel.call_boxed(keys, *wide, **more), kind)

        library.impl(name, product, "CPU", with_keyset=True, allow_override=True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        for name in PRODUCTS:
            summed_in_fp32(name)
    return library
