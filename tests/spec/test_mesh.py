"""GPUs of a stage lie on part of one node or on whole nodes, and its groups where their ranks do."""

import itertools

import pytest

from mist_megatron.spec.mesh import Group, Mesh, groups_of, nodes_and_gpus


@pytest.mark.parametrize(
    ("gpus", "found"), [(1, (1, 1)), (6, (1, 6)), (8, (1, 8)), (24, (3, 8)), (12, None), (0, None)]
)
def test_gpus_of_a_stage_on_nodes_of_eight(gpus: int, found: tuple[int, int] | None) -> None:
    assert nodes_and_gpus(gpus, 8) == found


@pytest.mark.parametrize("per_node", [2, 4, 6, 8])
def test_groups_touch_the_nodes_that_their_ranks_lie_on(per_node: int) -> None:
    """Of stages on whole nodes, matrices and experts split over one node or many, or over parts of some."""
    for gpus, tp, etp, ep in itertools.product((24, 32, 88, 120), *[(1, 2, 3, 4, 6, 8, 11, 15, 16)] * 3):
        if gpus % per_node or gpus % tp or gpus % (etp * ep):
            continue
        mesh = Mesh(tp=tp, cp=1, dp=gpus // tp, gpus_per_node=per_node, ep=ep, etp=etp, instances=1, inner=1)
        for group in (Group.TENSOR, Group.DATA, Group.EXPERT_TENSOR, Group.EXPERT, Group.EXPERT_ALL):
            touched = [len({rank // per_node for rank in ranks}) for ranks in groups_of(mesh, group, 0)]
            assert mesh.nodes(group) == max(touched), (group, mesh)
