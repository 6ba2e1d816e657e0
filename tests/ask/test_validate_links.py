"""`validate` on nodes whose links were measured: as `predict --links` of the row's plan."""

from __future__ import annotations

from pathlib import Path

import pytest

import mist_megatron as mm
from mist_megatron.calibrate.rows import read_rows
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import links_to_text
from mist_megatron.spec.links import LinkMatrix

HEADER = (
    "id,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,precision,measured_s"
)
ROW = (
    "a100-sxm-80gb,{nodes},8,megatron-core,small,gpt,4,1024,4096,16,16,50304,1024,64,1,{dp},1,1,1,full,"
    "bf16,0.2"
)


def test_rows_are_priced_by_the_links_of_the_first_nodes(tmp_path: Path):
    rates = ((None, 0.5e9), (0.5e9, None))
    links = tmp_path / "links.yaml"
    links.write_text(links_to_text([LinkMatrix(hosts=("a", "b"), bytes_per_s=rates, gpus_at_once=8)]))
    rows = {1: ROW.format(nodes=1, dp=8), 2: ROW.format(nodes=2, dp=16), 4: ROW.format(nodes=4, dp=32)}
    text = "\n".join([HEADER, *(f"{nodes},{row}" for nodes, row in rows.items())]) + "\n"
    (tmp_path / "runs.csv").write_text(text)
    plain, linked = mm.validate(tmp_path / "runs.csv"), mm.validate(tmp_path / "runs.csv", links=links)
    usual, slow = ([one.predicted for one in each.by_file["runs.csv"]] for each in (plain, linked))
    plans = [row.plan for row in read_rows(text, "runs.csv")]
    assert slow[0] == usual[0]  # one node uses no links
    assert slow[1].iteration_s > 1.2 * usual[1].iteration_s
    assert slow[1].iteration_s == pytest.approx(mm.predict(plans[1], links=links).iteration_s)
    assert slow[2] is None
    assert "figures of 2 nodes; the plan has 4" in linked.by_file["runs.csv"][2].skipped
    with pytest.raises(InputError, match="one node, which uses no links"):
        mm.predict(plans[0], links=links)
