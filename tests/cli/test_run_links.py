"""`calibrate run --links`: what is started on a node."""

from __future__ import annotations

from pathlib import Path

import pytest

from mist_megatron.cli.calibrate_run_links import LinkOptions, links_command
from mist_megatron.errors import InputError


def test_every_node_runs_the_same_command():
    out = Path("links.yaml")
    options = LinkOptions(links=True, nodes=4, rendezvous="first:29400")
    told = links_command(options, "python", None, out, {})
    assert told[:3] == ["python", "-m", "torch.distributed.run"]
    assert {"--nnodes=4", "--nproc-per-node=gpu", "--rdzv-endpoint=first:29400"} < set(told)
    assert told[-4:] == ["-m", "mist_patches.links_measure", "--out", "links.yaml"]
    ranked = {"RANK": "3", "WORLD_SIZE": "8"}
    assert links_command(LinkOptions(links=True), "python", None, out, ranked)[1:3] == told[-4:-2]
    for wrong, what in (
        (LinkOptions(links=True), "--nodes N and --rendezvous"),
        (LinkOptions(links=True, nodes=1, rendezvous="a:1"), "--nodes is 1"),
        (LinkOptions(links=True, nodes=2, rendezvous="a"), "HOST:PORT"),
    ):
        with pytest.raises(InputError, match=what):
            links_command(wrong, "python", None, out, {})
    with pytest.raises(InputError, match="its launcher knows them"):
        links_command(options, "python", None, out, ranked)


@pytest.mark.parametrize(
    ("nodes", "first"), [("cnode2-[001-003,007]", "cnode2-001"), ("a7,b9", "a7"), ("gpu[3,5]", "gpu3")]
)
def test_slurm_says_the_nodes_of_its_job(nodes, first):
    """As `scontrol show hostnames` writes such lists out, the first of them."""
    known = {"SLURM_JOB_NUM_NODES": "4", "SLURM_JOB_NODELIST": nodes}
    told = links_command(LinkOptions(links=True), "python", None, Path("l.yaml"), known)
    assert {"--nnodes=4", f"--rdzv-endpoint={first}:29400"} < set(told)
    said = LinkOptions(links=True, nodes=2, rendezvous="other:1")
    told = links_command(said, "python", None, Path("l.yaml"), known)
    assert {"--nnodes=2", "--rdzv-endpoint=other:1"} < set(told)
