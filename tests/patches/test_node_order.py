"""Ranks sit on the nodes that the plan names, whatever order a launcher starts them in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mist_patches.core.node_order import node_of_process, ordered, placed_gpu
from mist_patches.core.stage_shape import shape_problems
from mist_patches.links_check import problems, rounds_of
from mist_patches.links_measure import matrix_document, numbered, rounds_of_all

from mist_megatron.formats.links_yaml import is_links, links_from_text

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def document(**more: object) -> dict:
    def stage(index: int) -> dict:
        return {
            "stage": index, "first_rank": 2 * index, "ranks": 2, "layers": 4, "chunk_layers": [4], "dp": 2,
            "tp": 1, "micro_batch": 1, "zero": 1, "recompute": "none", "recompute_layers": 0,
            "offload": {"weights": 0.0, "grads": 0.0, "optimizer": 0.0, "activations": 0.0},
            "arguments": [],
        }  # fmt: skip

    return {
        "schema": 1, "framework": "megatron-core", "plan": "tiny", "world_size": 4, "tensor_parallel": 1,
        "context_parallel": 1, "pipeline_parallel": 2, "virtual_pipeline": 1, "rank_of_gpu": [2, 0, 3, 1],
        "hosts": ["n1", "n2", "n3", "n4"], "spare_hosts": ["n9", "n8"],
        "links": [[0, 1, 1.0], [0, 2, 1.0], [2, 3, 1e15]], "environment": {}, "patches": [],
        "stages": [stage(0), stage(1)], **more,
    }  # fmt: skip


def test_nodes_are_found_by_name():
    assert not list(shape_problems(document()))
    for host, node in (("n1", 0), ("n3.cluster.example", 2), ("n4", 3)):
        assert node_of_process(document(), {"MIST_NODE_NAME": host}) == (node, [])
    environment = {"SLURMD_NODENAME": "n2", "LOCAL_RANK": "1"}
    assert placed_gpu(document(world_size=8), environment) == 3


def test_a_missing_node_is_replaced_by_the_best_spare_with_a_warning():
    order, told = ordered(["n1", "n2", "n3"], ["n8", "n9", "n2"], ["n9", "n8"])
    assert order == ["n9", "n2", "n8"]
    assert told == [
        "mist: the job did not get node n1; n9 takes its place",
        "mist: the job did not get node n3; n8 takes its place",
    ]
    order, told = ordered(["n1", "n2"], ["n2.a.b", "x7.a.b"])
    assert order == ["x7", "n2"]
    assert "whose links nobody measured" in told[0]
    # The same on every node, whatever order the list has.
    assert ordered(["n1", "n2", "n3"], ["n2", "n9", "n8"], ["n9", "n8"])[0] == ["n9", "n2", "n8"]


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"MIST_NODE_NAME": "x1", "LOCAL_RANK": "0"}, "x1 is none of the plan's nodes n1, n2, n3, n4"),
        ({"MIST_NODE_NAME": "n1", "LOCAL_RANK": "0", "MIST_HOSTS": "n1,n2"}, "for 4 nodes, the job got 2"),
        ({"MIST_NODE_NAME": "n1", "LOCAL_RANK": "0", "MIST_HOSTS": "n1 n2 n2 n3"}, "n2 is listed twice"),
        ({"MIST_NODE_NAME": "z", "LOCAL_RANK": "0", "MIST_HOSTS": "n1 n2 n3 n4"}, "z is none of the job's"),
        ({"MIST_NODE_NAME": "n1"}, "LOCAL_RANK is not set"),
        ({"MIST_NODE_NAME": "n1", "LOCAL_RANK": "1"}, "LOCAL_RANK is 1; the plan has 4 GPUs on 4 nodes"),
    ],
)
def test_never_by_index_without_a_word(environment, told):
    with pytest.raises(SystemExit) as stopped:
        placed_gpu(document(), environment)
    assert told in str(stopped.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("hosts", ["n1", "n1", "n2", "n3"]), ("hosts", ["n1", "n2", "n3"]), ("links", [[0, 1]]), ("hosts", [])],
)
def test_damaged_names_are_refused(key, value):
    assert list(shape_problems(document(**{key: value})))


def test_all_pairs_meet_in_as_few_rounds_as_there_can_be():
    for nodes in range(2, 12):
        rounds = rounds_of_all(nodes)
        assert len(rounds) == nodes - 1 + nodes % 2
        assert sorted(pair for one in rounds for pair in one) == [
            (a, b) for a in range(nodes) for b in range(a + 1, nodes)
        ]
        assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in rounds)


def test_a_slow_figure_that_was_a_busy_minute_is_dropped():
    figures = {(0, 1): [10e9, 11e9], (1, 0): [2e9, 10e9, 10e9]}
    made = matrix_document(2, figures, at_once=8, message_bytes=1 << 20)
    assert made["gb_per_s"] == [[None, 10.5], [10.0, None]]
    assert made["spread"] == pytest.approx((((0.5 / 10.5) ** 2 * 2) / 2) ** 0.5, abs=1e-4)
    assert is_links(json.dumps({"schema": 1, "kind": "links", "hosts": ["a", "b"], "matrices": []}, indent=1))


def test_rounds_never_ask_a_node_twice():
    rounds = rounds_of([(a, b, 1.0) for a in range(6) for b in range(a + 1, 6)])
    assert sum(map(len, rounds)) == 15
    for one in rounds:
        nodes = [node for pair in one for node in pair[:2]]
        assert len(nodes) == len(set(nodes))
    assert len(rounds) <= 7
    slow = problems(document(links=[[0, 1, 10e9]]), {(0, 1): 6e9})
    assert slow == ["mist: n1 - n2 carries 6 GB/s, 60% of the 10 that the plan counts on"]
    assert not problems(document(links=[[0, 1, 10e9]]), {(0, 1): 8e9})


def test_nodes_are_listed_as_schedulers_do():
    assert sorted(["n10", "a-2", "n9", "a"], key=numbered) == ["a", "a-2", "n9", "n10"]


@pytest.mark.parametrize(
    ("names", "hosts", "order"),
    [
        # rank_of_gpu [2, 0, 3, 1]: ranks 0 1 2 3 sit on the plan's nodes n2 n4 n1 n3; n2 is replaced by n9.
        (["n9", "n4", "n1", "n3"], "n1,n3,n4,n9", ["n9", "n4", "n1", "n3"]),
    ],
)
def test_four_processes_under_made_up_names(names, hosts, order, tmp_path):
    """Real processes over gloo, numbered by a launcher in an order of its own."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "tests" / "framework"))
    from ports import free_port

    stages = tmp_path / "stages.json"
    stages.write_text(json.dumps(document()))
    port = free_port()
    started = []
    for launched, name in enumerate(names):
        environment = {
            **os.environ, "RANK": str(launched), "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MIST_NODE_NAME": name,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            **({"MIST_HOSTS": hosts} if hosts else {}),
        }  # fmt: skip
        command = [sys.executable, str(HERE / "placed_ranks.py"), str(stages)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment, **pipes))
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 4, [err for _, err in ended]
    (line,) = [line for out, _ in ended for line in out.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["names"] == order
    assert result["pairs"] == [[0, 1], [0, 2], [2, 3]]
    (matrix,) = links_from_text(json.dumps(result["every"], indent=1), "links.yaml")
    assert list(matrix.hosts) == ["n1", "n3", "n4", "n9"]
    assert (len(matrix.rates), matrix.unmeasured, matrix.repeats) == (12, (), 2)
    assert len(result["told"]) == 1  # only the pair that was said to carry a petabyte
    warned = "".join(err for _, err in ended)
    assert ("did not get node n2; n9 takes its place" in warned) == (hosts is not None)
