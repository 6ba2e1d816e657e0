"""What a shell is offered for options."""

from __future__ import annotations

from mist_megatron.cli.options import complete_gpus, complete_models


def test_completion_offers_names() -> None:
    assert "gpt3-175b" in complete_models("gpt3-1")
    assert complete_gpus("h100") == ["h100-sxm-80gb", "h100-pcie-80gb"]
