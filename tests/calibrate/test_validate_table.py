"""`validate` as people read it: headers and figures fit 80 columns."""

from __future__ import annotations

HEADER = (
    "id,gpu,nodes,gpus_per_node,framework,model,family,layers,hidden,ffn_hidden,heads,kv_heads,vocab,"
    "seq_len,global_batch,micro_batch,dp,tp,pp,zero,recompute,precision,measured_s,group"
)
ROW = (
    "a100-sxm-80gb,1,8,megatron-core,small,gpt,4,1024,4096,16,16,50304,1024,{batch},2,8,1,1,1,full,bf16,0.2,g"
)


def test_tables_fit_80_columns(ran_here, tmp_path):
    lines = [
        HEADER,
        "one," + ROW.format(batch=64),
        "two," + ROW.format(batch=128),
        "bad," + ROW.format(batch=60),
    ]
    (tmp_path / "runs_of_a_long_name.csv").write_text("\n".join(lines) + "\n")
    ran = ran_here("validate", "runs_of_a_long_name.csv")
    assert ran.code == 0
    shown = ran.out.splitlines()
    tables = shown[: shown.index("furthest off")]
    assert max(map(len, tables)) <= 80
    assert shown[0].split() == ["time", "rows", "error", "bias", "rank", "regret", "worst"]
    assert shown[1].split()[:4] == ["runs_of_a_long_name", "2", "of", "3"]
    assert "not predicted: bad" in ran.out


def test_the_picture_replaces_no_measurement(ran_here, tmp_path):
    rows = f"{HEADER}\none,{ROW.format(batch=64)}\n"
    (tmp_path / "runs.csv").write_text(rows)
    (tmp_path / "old.svg").write_text("what was there before")
    wrong = (("runs.csv", "is what the command reads"), ("no/x.svg", "no folder no"), (".", "is a folder"))
    for path, words in wrong:
        refused = ran_here("validate", "runs.csv", "--plot", path)
        assert (refused.code, refused.out) == (2, "")
        assert words in refused.err
    assert (tmp_path / "runs.csv").read_text() == rows
    assert ran_here("validate", "runs.csv", "--plot", "old.svg").code == 0
    assert (tmp_path / "old.svg").read_text().endswith("</svg>\n")
    assert {path.name for path in tmp_path.iterdir()} == {"runs.csv", "old.svg"}
