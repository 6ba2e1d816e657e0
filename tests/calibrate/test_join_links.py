"""Links of one's own nodes: measured by a command on every node, and joined to a profile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from mist_megatron.ask.evaluators import prices_for
from mist_megatron.ask.job_words import job
from mist_megatron.calibrate.link_tables import as_it_is, join_links
from mist_megatron.calibrate.profiles import load_profile, profile_named
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import links_from_text, links_to_text
from mist_megatron.price.prices import Collective
from mist_megatron.spec.catalogue import gpu
from mist_megatron.spec.links import LinkMatrix
from tests.command_line import run

A100 = gpu("a100-sxm-40gb")


def matrix(at_once: int, rate: float = 4e9) -> LinkMatrix:
    rows = tuple(tuple(None if a == b else rate for b in range(3)) for a in range(3))
    return LinkMatrix(hosts=("a", "b", "c"), bytes_per_s=rows, gpus_at_once=at_once, date="2026-11-20")


def test_nodes_send_what_was_measured_of_them(tmp_path, capsys):
    """A send of 1 GB between nodes takes 1 GB / 4 GB/s and a latency, whatever the base says."""
    links, out = tmp_path / "links.yaml", tmp_path / "mine.yaml"
    links.write_text(links_to_text([matrix(1, 9e9), matrix(8)]))
    assert run(["calibrate", "fit", str(links), "--gpu", "a100-sxm-40gb", "--out", str(out)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "nodes send 32 GB/s, 64%" in said
    assert "25 curves of collectives between other nodes left out" in said
    made = load_profile(out)
    assert made.sources[made.links.inter_fraction.source].origin == "measured"
    assert made.kernels == profile_named("a100-sxm-40gb").kernels
    prices, _ = prices_for(job(model="gpt3-1.3b", gpus=16, gpu=str(out)))
    sent = prices.of(Collective("send_recv", 1e9, 2.0, 2.0)).seconds
    assert float(sent) == pytest.approx(0.25 + made.links.inter_latency_s.value)


def test_links_that_say_nothing_of_a_whole_node_are_refused():
    base = profile_named("a100-sxm-40gb")
    with pytest.raises(InputError, match="of 1 GPUs of a node at once"):
        join_links(base, A100, [matrix(1)], "links.yaml")
    with pytest.raises(InputError, match="check the units"):
        join_links(base, A100, [matrix(8, 4e11)], "links.yaml")
    assert as_it_is(base, "mine").content_hash == base.content_hash


def test_a_second_cluster_is_refused(tmp_path, capsys):
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(links_to_text([matrix(8)]))
    files = [str(tmp_path / f"{name}.yaml") for name in ("one", "two")]
    out = tmp_path / "out.yaml"
    assert run(["calibrate", "fit", *files, "--gpu", "a100-sxm-40gb", "--out", str(out)]) == 2
    assert "links are of one cluster" in capsys.readouterr().err
    assert not out.exists()


def test_two_nodes_measure_their_link(tmp_path):
    """Processes under made-up host names, over gloo."""
    pytest.importorskip("torch")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    out = tmp_path / "links.yaml"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "mist_megatron", "calibrate", "run", "--links", "--device", "cpu",
             "--out", str(out), "--json"],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0",
                 "MASTER_PORT": str(port), "MASTER_ADDR": "127.0.0.1",
                 "MIST_NODE_NAME": f"node-{'ba'[rank]}.x"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    (found,) = links_from_text(out.read_text(), "links.yaml")
    assert found.hosts == ("node-a", "node-b")  # by name, though node-b came first
    assert (len(found.rates), found.repeats) == (2, 2)
    assert run(["calibrate", "run", "--links", "--out", str(out)]) == 2


@pytest.mark.parametrize("at_once", [7, 8, 9])
@pytest.mark.parametrize("share", [0.5, 4.0, 4.001])
def test_what_a_node_sends_is_a_share_of_its_usual_network(at_once, share):
    """Of all GPUs of a usual node or more, up to four times what its network carries."""
    base, usual = profile_named("a100-sxm-40gb"), A100.inter_bytes_per_s.value
    sent = replace(matrix(at_once, share * usual / at_once), source="mine")
    if at_once < 8 or share > 4.0:
        told = "of 7 GPUs of a node at once" if at_once < 8 else "check the units"
        with pytest.raises(InputError, match=told):
            join_links(base, A100, [matrix(1), sent], "links.yaml")
        return
    made, notes = join_links(base, A100, [matrix(1), sent], "links.yaml")
    fraction = made.links.inter_fraction
    assert (fraction.value, fraction.points, fraction.error) == (pytest.approx(share, rel=1e-4), 6, None)
    source = made.sources[fraction.source]
    assert source.text == "mine, 2026-11-20, 3 nodes, the median of 6 links"
    assert source.uncertainty == 0.0
    inside = [curve for curve in base.collectives if curve.nodes == 1]
    assert list(made.collectives) == inside
    of_it = f"{share * usual / 1e9:.3g} GB/s, {share:.0%} of {A100.usual_network}"
    assert notes[0].startswith(f"links: nodes send {of_it}, median of 6 links that vary by 0%")
    gone = len(base.collectives) - len(inside)
    assert notes[1:] == (f"links: {gone} curves of collectives between other nodes left out",)
    assert len(join_links(made, A100, [sent], "links.yaml")[1]) == 1


def test_links_that_differ_are_as_uncertain_as_they_differ():
    """To the fourth digit."""
    rows = ((None, 1e9, 1.21e9), (1e9, None, 1.47e9), (1e9, 1e9, None))
    uneven = replace(matrix(8), bytes_per_s=rows)
    source = join_links(profile_named("a100-sxm-40gb"), A100, [uneven], "links.yaml")[0].sources["links"]
    rates = [rate for row in rows for rate in row if rate]
    assert source.uncertainty == round(pstdev(rates) / fmean(rates), 4)
