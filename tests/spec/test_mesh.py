"""GPUs of a stage lie on part of one node or on whole nodes."""

import pytest

from mist_megatron.spec.mesh import nodes_and_gpus


@pytest.mark.parametrize(
    ("gpus", "found"), [(1, (1, 1)), (6, (1, 6)), (8, (1, 8)), (24, (3, 8)), (12, None), (0, None)]
)
def test_gpus_of_a_stage_on_nodes_of_eight(gpus: int, found: tuple[int, int] | None) -> None:
    assert nodes_and_gpus(gpus, 8) == found
