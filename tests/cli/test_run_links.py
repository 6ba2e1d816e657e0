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
