"""Links between nodes: from logs, matrices and tables into links.yaml, and what is told of them."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from nccl_output import MATRIX, nccl_row, table

from mist_megatron.calibrate.imported import Hints
from mist_megatron.calibrate.links import ASYMMETRIC, MOST_GPUS_A_NODE, Link, matrices_of, read_links
from mist_megatron.errors import InputError
from mist_megatron.formats.links_yaml import is_links, links_from_text, links_to_text
from mist_megatron.spec.links import LinkMatrix

HINTS = Hints(date="2026-11-21")


def pair_log(one: str, other: str, gb_per_s: float, gpus: int = 1) -> str:
    """alltoall before sendrecv, as the published programs run them."""
    sizes = (1 << 25, 1 << 30)
    rows = [nccl_row(size, size / gb_per_s * 1e-3, 1.0) for size in sizes]
    text = table(rows, [one] * gpus + [other] * gpus)
    return text.replace("all_reduce", "alltoall") + text.replace("all_reduce", "sendrecv")


def read(*texts: tuple[str, str], **words):
    links = [link for name, text in texts for link in read_links(text, name, HINTS, **words).links]
    return matrices_of(links)


def test_every_published_pair_gets_the_figure_that_its_table_prints(measured_dir):
    """Against the matrices that were made of the same logs by other means."""
    folder = measured_dir / "links"
    if not folder.is_dir():
        pytest.skip("the measured logs are not here")
    links = []
    for path in sorted((folder / "xxrjun_h100_pairs_cluster00").iterdir()):
        try:
            links += read_links(path.read_text(), path.name, HINTS).links
        except InputError:
            continue
    matrices, notes = matrices_of(links)
    assert [(len(m.hosts), len(m.unmeasured), m.gpus_at_once) for m in matrices] == [(17, 5, 1), (17, 5, 8)]
    assert [round(m.variation, 2) for m in matrices] == [0.24, 0.02]
    assert "5 of 136 pairs were never measured" in notes[0]
    for matrix in matrices:
        with (folder / f"cluster00_G{matrix.gpus_at_once}_sendrecv_GBps.csv").open(newline="") as file:
            rows = list(csv.reader(file))
        assert rows[0][1:] == list(matrix.hosts)
        for row, found in zip(rows[1:], matrix.bytes_per_s, strict=True):
            for text, rate in zip(row[1:], found, strict=True):
                assert (rate is None) == (text == "")
                assert rate is None or rate / 1e9 == pytest.approx(float(text), abs=0.04)
    assert links_from_text(links_to_text(matrices), "links.yaml")[0].hosts == matrices[0].hosts


def test_published_snapshots_are_repeats_of_each_other(measured_dir):
    path = measured_dir / "hardware" / "pipette_bandwidth_matrix.csv"
    links = read_links(path.read_text(), path.name, HINTS).links
    ((matrix,), _) = matrices_of([link for link in links if "2node" not in link.run])
    assert (len(matrix.hosts), matrix.unmeasured, matrix.repeats) == (16, (), 2)
    assert matrix.spread == pytest.approx(0.025, abs=0.005)
    # recv: the row receives from the column
    receiver, sender = matrix.hosts.index("agpu1475"), matrix.hosts.index("agpu1478")
    assert matrix.bytes_per_s[sender][receiver] == pytest.approx(19.6e9, rel=0.03)


def test_pairs_of_several_counts_and_names_with_domains():
    (one, eight), _ = read(
        ("a.log", pair_log("n1", "n2", 10.0)),
        ("b.log", pair_log("n1.cluster.example", "n2.cluster.example", 12.0)),
        ("c.log", pair_log("n1", "n10", 40.0, gpus=8)),
        ("d.log", pair_log("n2", "n10", 41.0, gpus=8)),
    )
    assert one.hosts == eight.hosts == ("n1", "n2", "n10")
    assert one.bytes_per_s[0][1] == pytest.approx(11e9, rel=1e-3)  # two measurements of one pair
    assert (one.repeats, one.spread) == (2, pytest.approx(2**0.5 / 11, rel=0.01))
    assert (eight.gpus_at_once, eight.spread) == (8, None)
    assert eight.message_bytes == 1 << 30
    assert one.unmeasured == (("n1", "n10"), ("n2", "n10"))


def test_both_ends_of_one_transfer_are_one_measurement():
    (matrix,), notes = read(("net.txt", MATRIX.replace("12000.0", "0.0")))
    assert matrix.hosts == ("n1", "n2", "n3")
    assert (matrix.spread, matrix.repeats) == (None, 1)
    assert any("dead links, never used" in note for note in notes)


def test_how_many_gpus_sent_is_told_where_it_is_guessed():
    text = SQUARE.format(unit="GB/s")
    eight = read_links(text, "cluster_G8_pairs.csv", HINTS)
    assert {link.gpus_at_once for link in eight.links} == {8}
    assert "G8 in its name is read as 8 GPUs" in eight.notes[-1]
    assert "taken for 1" in read_links(text, "x.csv", HINTS).notes[-1]
    said = read_links(text, "cluster_G8_pairs.csv", Hints(date="", gpus_at_once=4))
    assert ({link.gpus_at_once for link in said.links}, said.notes) == ({4}, ())


def test_old_logs_say_by_their_name_or_the_user_what_ran():
    lines = table([nccl_row(1 << 25, 3000.0, 1.0)], ["n1", "n2"]).splitlines()
    old = "\n".join(line for line in lines if "all_reduce" not in line)
    with pytest.raises(InputError, match="--collective send_recv"):
        read_links(old, "n1_n2.log", HINTS)
    named = read_links(old, "n1_n2_sendrecv.log", HINTS).links
    assert (
        named == read_links(old, "n1_n2_sendrecv.log", Hints(date=HINTS.date, collective="send_recv")).links
    )
    assert (named[0].sender, named[0].receiver) == ("n1", "n2")
    assert named[0].bytes_per_s == pytest.approx((1 << 25) / 3000e-6)


def test_json_of_a_pair_and_labelled_mpigraph():
    side = {"time": 100.0, "alg_bw": 10.48, "bus_bw": 10.48, "nwrong": 0.0}
    document = {
        "nccl_version": "22807", "args": ["sendrecv_perf", "-J", "x"], "start_time": "2026-01-02 10:00",
        "devices": [{"rank": rank, "hostname": f"n{rank}", "device_info": "H100"} for rank in (0, 1)],
        "results": [{"size": 1 << 20, "type": "float", "out_of_place": side, "in_place": None}],
    }  # fmt: skip
    (matrix,), _ = read(("x.json", json.dumps(document)))
    assert (matrix.hosts, matrix.date) == (("n0", "n1"), "2026-01-02")
    assert matrix.bytes_per_s[0][1] == pytest.approx((1 << 20) / 100e-6)
    labelled = "".join(f"0: {line}\n" for line in MATRIX.splitlines() if line.strip())
    assert read(("net.txt", labelled)) == read(("net.txt", MATRIX))


def test_pairs_with_smaller_messages_than_others_are_told():
    cut = table([nccl_row(1 << 25, 3000.0, 1.0)], ["n1", "n3"]).replace("all_reduce", "sendrecv")
    _, notes = read(("a.log", pair_log("n1", "n2", 10.0)), ("b.log", cut))
    assert any(
        "1 pairs were measured with messages of 32 MiB at least, others with 1,024" in n for n in notes
    )


SQUARE = "{unit},n1,n2,n3\nn1,,10,20\nn3,21,30,\nn2,12,,-\n"


@pytest.mark.parametrize(
    ("unit", "rate"),
    [("GB/s", 20e9), ("Gbps", 2.5e9), ("GiB/s", 20 * 2.0**30), ("MBps", 20e6), ("Gb/s", 2.5e9)],
)
def test_units_are_read_off_the_corner(unit, rate):
    (matrix,), _ = read(("x.csv", SQUARE.format(unit=unit)))
    assert matrix.bytes_per_s[0][2] == pytest.approx(rate)
    assert matrix.bytes_per_s[1][2] is None
    assert matrix.rate(1, 2) == pytest.approx(1.5 * rate)  # the other way stands for both


def test_nodes_called_like_columns_are_a_matrix_and_lines_of_a_pair_repeats():
    (matrix,), _ = read(("x.csv", SQUARE.format(unit="GB/s").replace("n1", "a").replace("n2", "b")))
    assert (matrix.hosts, matrix.bytes_per_s[0][1]) == (("a", "b", "n3"), 10e9)
    (pairs,), _ = read(("y.csv", "src,dst,GB/s\na,b,10\na,b,12\nb,a,11\n"))
    assert pairs.bytes_per_s[0][1] == 11e9
    assert (pairs.repeats, pairs.spread) == (1, pytest.approx(2**0.5 / 11, rel=0.01))


def test_units_of_names_and_options():
    assert read(("m_GBps.csv", SQUARE.format(unit="")))[0][0].bytes_per_s[0][1] == 10e9
    assert read(("x.csv", SQUARE.format(unit="")), unit="MB/s")[0][0].bytes_per_s[0][1] == 10e6
    given = read_links(SQUARE.format(unit="Gb/s"), "x.csv", HINTS, unit="GB/s")
    assert given.links[0].bytes_per_s == 10e9
    assert given.notes[0] == "x.csv: the table says Gb/s; read as GB/s, as asked"
    (matrix,), _ = read(("x.csv", "src,dst,bandwidth_GiB_per_s\nn1,n2,2\nn2,n1,2\n"))
    assert matrix.bytes_per_s[0][1] == 2 * 2.0**30
    text = "src\tdst\tbandwidth\nn1\tn2\t5\nn2\tn1\t40\n"
    (matrix,), notes = read(("x.tsv", text), unit="GB/s")
    assert matrix.bytes_per_s[1][0] == 40e9
    assert "8.0 times as much as the other way" in notes[0]


ONE_PAIR = """schema: 1
kind: links
hosts: [a, b]
matrices:
- {{gb_per_s: [[null, 1.0], [1.0, null]], {said}}}
"""


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("x.csv", SQUARE.format(unit=""), "which unit its figures have is not said"),
        ("x.csv", "GB/s,n1,n2\nn1,,1\n", "1 rows and 2 columns, 'n2' in one of them alone; wanted a square"),
        ("x.csv", "GB/s,n1,n2\nn1,,1\nn1,,1\n", "2 rows and 2 columns, 'n2' in one of them alone; wanted"),
        ("x.csv", "GB/s,n1,n2\nn1,,1\nn2,1\n", "row 3: 1 figures; wanted 2: cut off?"),
        ("x.csv", "GB/s,n1,n2\nn1,,-1\nn2,1,\n", "row 2, n2: '-1'"),
        ("x.csv", "GB/s,n1,n2\nn1,,1\nn2,inf,\n", "row 3, n1: 'inf'"),
        ("x.csv", "src,dst,GB/s\na,b,1\nb,a,x\n", "row 3, GB/s: 'x'"),
        ("x.csv", "src,dst,bandwidth\na,b,1\n", "which unit its figures have is not said"),
        ("x.csv", "from,to,what\nn1,n2,3\n", "no column of rates"),
        ("x.csv", "# nothing\n", "no lines of figures"),
        ("x.log", pair_log("n1", "n2", 9.0).split("sendrecv")[0], "no output of sendrecv_perf on two nodes"),
        ("x.log", "hello", "not the output of a known tool"),
        ("x.yaml", "schema: 1\nkind: links\nhosts: [a, b]\nmatrices: []\n", "matrices is empty"),
        ("x.yaml", "schema: 1\nkind: links\nhosts: [a, b]\nmatrices: [{gb_per_s: [[1]]}]\n", "not 2 x 2"),
        ("x.yaml", ONE_PAIR.format(said="spread: -1.0"), "spread is -1; wanted 0 or more"),
        ("x.yaml", ONE_PAIR.format(said="spread: .nan"), "spread is nan; wanted 0 or more"),
        ("x.yaml", ONE_PAIR.format(said="message_bytes: -5.0"), "message_bytes is -5.0"),
        ("x.yaml", "schema: 2\nkind: links\nhosts: [a, b]\nmatrices: []\n", "schema is 2"),
    ],
)
def test_broken_links_are_refused(name, text, told):
    with pytest.raises(InputError) as caught:
        read_links(text, name, HINTS)
    assert told in caught.value.message
    assert caught.value.message.startswith(name)


@pytest.mark.parametrize(
    "head", ["sender,receiver,GB/s,run,x", "GB/s,receiver,sender,x,x", "run,sender,direction,receiver,GB/s"]
)
def test_rows_that_lack_what_is_read_are_refused_and_no_others(head):
    """A table of pairs, its last row cut before each of its columns; nobody reads x."""
    named = {"sender": "n1", "receiver": "n2", "GB/s": "3", "run": "a", "direction": "send", "x": "9"}
    row = [named[column] for column in head.split(",")]
    asked = len(head.rstrip(",x").split(","))
    for kept in range(1, len(row) + 1):
        text = "\n".join((head, ",".join(row), ",".join(row[:kept]), ""))
        if kept >= asked:
            (matrix,), _ = read(("x.csv", text))
            assert (matrix.hosts, matrix.bytes_per_s[0][1]) == (("n1", "n2"), 3e9)
        else:
            with pytest.raises(InputError, match=f"row 3: {kept} columns; wanted 5: cut off"):
                read(("x.csv", text))


def test_commands_read_a_folder_and_show_what_stands_out(ran_here, tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    rates = {(a, b): 20.0 for a in range(1, 6) for b in range(a + 1, 6)}
    rates |= {(a, b): 4.0 for a, b in rates if 3 in (a, b)} | {(1, 2): 1.5}
    for (a, b), rate in rates.items():
        (logs / f"{a}_{b}.log").write_text(pair_log(f"n{a}", f"n{b}", rate, gpus=4))
    (logs / "broken.log").write_text(pair_log("n1", "n2", 9.0)[:300])
    out = tmp_path / "links.yaml"
    ran = ran_here("calibrate", "import", "--links", str(logs), "--out", str(out), "--json")
    assert ran.code == 0
    told = json.loads(ran.out)
    assert (told["files"], len(told["refused"]), len(told["hosts"])) == (11, 1, 5)
    assert is_links(out.read_text())
    shown = ran_here("calibrate", "show", str(out))
    assert "n1  ..##" in shown.out
    assert "n3 .. .." in shown.out
    assert "slow nodes, links on average: n3 (4 GB/s)" in shown.out
    assert "n1 - n2 1.5" in shown.out
    document = json.loads(ran_here("calibrate", "show", str(out), "--json").out)["matrices"][0]
    assert [slow["host"] for slow in document["slow_nodes"]] == ["n3"]
    assert document["best_ring_gain"] > 2.0
    fitted = ran_here(
        "calibrate", "fit", str(out), "--gpu", "h100-sxm-80gb", "--out", str(tmp_path / "p.yaml")
    )
    assert (fitted.code, "of 4 GPUs of a node at once" in fitted.err) == (2, True)
    for words, message in (
        (("--unit", "GB/s"), "wanted --links beside them"),
        (("--links", "--gpus-at-once", "0"), "at least 1"),
    ):
        refused = ran_here("calibrate", "import", str(logs), *words, "--out", str(out), "--force")
        assert refused.code == 2
        assert message in refused.err


@pytest.mark.parametrize("host", ["../x", "a b", "n1;reboot", "-n1", "n..1", "$HOME", "n1/2", ".n1"])
def test_what_is_no_host_name_is_refused(host):
    """It goes into launch scripts."""
    rows = ((None, 1e9), (1e9, None))
    with pytest.raises(InputError, match="is no host name"):
        LinkMatrix(hosts=("n0", host), bytes_per_s=rows)
    for fine in ("n1", "gpu-7.cluster.example.org", "10.0.0.7", "node_3", "x7:12"):
        assert LinkMatrix(hosts=("n0", fine), bytes_per_s=rows).hosts[1] == fine


def test_where_a_placed_plan_goes_is_checked_before_the_work(tmp_path, ran_here):
    """The plan is not even read."""
    for out, told in ((tmp_path, "is a folder"), (tmp_path / "no" / "x.yaml", "there is no folder")):
        refused = ran_here("place", str(tmp_path / "plan.yaml"), "--links", "none.yaml", "--out", str(out))
        assert (refused.code, told in refused.err) == (2, True)
    (tmp_path / "there.yaml").write_text("mine")
    refused = ran_here("place", "p.yaml", "--links", "none.yaml", "--out", str(tmp_path / "there.yaml"))
    assert (refused.code, "exists" in refused.err) == (2, True)
    assert (tmp_path / "there.yaml").read_text() == "mine"


def test_figures_that_say_their_own_noise_are_as_sure_as_the_least_sure() -> None:
    """Beside each other: the widest spread, the fewest repeats; a link that was dead once is dead."""
    said = {"source": "x", "run": "1"}
    links = [
        Link(sender="a", receiver="b", bytes_per_s=9e9, spread=0.05, repeats=4, **said),
        Link(sender="b", receiver="a", bytes_per_s=8e9, spread=0.10, repeats=2, **said),
        Link(sender="b", receiver="c", bytes_per_s=7e9, **said),
        Link(sender="b", receiver="c", bytes_per_s=0.0, **said),
    ]
    matrices, notes = matrices_of(links)
    assert (matrices[0].spread, matrices[0].repeats) == (0.10, 1)
    assert (matrices_of(links[:2])[0][0].spread, matrices_of(links[:2])[0][0].repeats) == (0.10, 2)
    assert matrices[0].bytes_per_s == ((None, 9e9, None), (8e9, None, 0.0), (None, None, None))
    assert any("1 dead links" in note and "b to c" in note for note in notes)


@pytest.mark.parametrize(("short", "told"), [(6, 6), (7, 6)])
def test_pairs_that_were_cut_short_are_named_up_to_six(short: int, told: int) -> None:
    links = [
        Link(sender="a", receiver=f"n{k}", bytes_per_s=1e9, message_bytes=2**20 if k < short else 2**30)
        for k in range(short + 1)
    ]
    (note,) = (one for one in matrices_of(links)[1] if "cut off" in one)
    assert note.startswith(f"{short} pairs") and "1 MiB" in note and "1,024 MiB" in note
    assert note.count("a - n") == told and note.endswith(", ...") == (short > told)


def test_a_matrix_between_nodes_alone_is_read_as_links() -> None:
    """Nothing is said of the GPUs inside, and nothing is told of them."""
    matrix = LinkMatrix(hosts=("a", "b"), bytes_per_s=((None, 2e9), (1e9, None)))
    links = read_links(links_to_text([matrix]), "links.yaml", HINTS).links
    assert [(link.sender, link.receiver, link.bytes_per_s) for link in links] == [
        ("a", "b", 2e9), ("b", "a", 1e9),
    ]  # fmt: skip


@pytest.mark.parametrize("last", [MOST_GPUS_A_NODE - 1, MOST_GPUS_A_NODE])
def test_gpus_of_a_node_have_numbers_of_a_node(last: int) -> None:
    text = f"src,dst,GB/s\nn1,n2,3\nn1:0,n1:{last},9\n"
    if last < MOST_GPUS_A_NODE:
        (matrix,), _ = read(("x.csv", text))
        assert matrix.inside[0][0][last] == 9e9
        assert sum(rate is not None for row in matrix.inside[0] for rate in row) == 1
    else:
        with pytest.raises(InputError, match=f"a GPU has number {last}; wanted those of a node"):
            read(("x.csv", text))


def test_nodes_come_in_the_order_of_their_numbers_whatever_they_are_called() -> None:
    """Names that begin with a number beside those that do not, in whatever order they were measured."""
    wanted = ("2n", "10n", "10n3", "n", "n2", "n2a", "n10", "nx", "x-07", "x-8")
    for turned in range(len(wanted)):
        names = [*wanted[turned:], *wanted[:turned]][::-1]
        (matrix,), _ = matrices_of([Link(sender=a, receiver=b, bytes_per_s=1e9) for a, b in pairwise(names)])
        assert matrix.hosts == wanted


def table_of(text: str, name: str = "x.csv", **words):
    """Host pairs -> bytes per second, and what was told."""
    found = read_links(text, name, HINTS, **words)
    return [(link.sender, link.receiver, link.bytes_per_s, link.run) for link in found.links], found.notes


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_says_the_same_whatever_parts_its_columns(separator: str) -> None:
    """The unit above, in a comment or in the name; a node's rate to itself is none; a second run of a pair is
    counted where no column says so."""
    square = "unit,n1,n2,\nn1,5,10,\nn2,11,-,\n".replace(",", separator)
    wanted = [("n1", "n2", 10e9, "x.csv "), ("n2", "n1", 11e9, "x.csv ")]
    assert table_of(square.replace("unit", "GB/s"))[0] == wanted
    assert table_of("# in GB/s\n\n" + square)[0] == wanted
    assert table_of(square, "x_GBps.csv")[0] == [(a, b, r, "x_GBps.csv ") for a, b, r, _ in wanted]
    pairs = "src,dst,GB/s\na,b,1\na,b,2\na,a,9\nb,a,n/a\nb,a,0\n".replace(",", separator)
    links, notes = table_of(pairs)
    assert links == [("a", "b", 1e9, "x.csv 1"), ("a", "b", 2e9, "x.csv 2"), ("b", "a", 0.0, "x.csv 1")]
    assert notes[0] == "x.csv: 1 lines without a figure"
    both = "run,dst,src,direction,MB/s\n7,b,a,Send,1\n7,b,a,recv,2\n8,b,a,receive,3\n".replace(",", separator)
    assert table_of(both)[0] == [
        ("a", "b", 1e6, "x.csv 7"),
        ("b", "a", 2e6, "x.csv 7"),
        ("b", "a", 3e6, "x.csv 8"),
    ]
    assert len(table_of(both)[1]) == 1  # how many GPUs sent is not said


@pytest.mark.parametrize("missing", [1, 6, 7])
def test_what_stands_out_of_links_is_told(missing: int) -> None:
    """Pairs that nobody measured, of all that there are, six of them by name; dead links; ways of a pair that
    are more than ASYMMETRIC apart."""
    hosts, apart = [f"n{k}" for k in range(8)], {("n6", "n7"): ASYMMETRIC, ("n5", "n7"): 3.03}
    gone = sorted([*combinations(hosts[:4], 2), ("n0", "n4")][:missing])
    links = [
        Link(
            sender=a, receiver=b, gpus_at_once=4,
            bytes_per_s=0.0 if (a, b) == ("n7", "n4") else 1e9 * apart.get((a, b), 1.0),
        )
        for a in hosts for b in hosts if a != b and (a, b) not in gone and (b, a) not in gone
    ]  # fmt: skip
    named = ", ".join(f"{a} - {b}" for a, b in gone[:6]) + (", ..." if missing > 6 else "")
    assert matrices_of(links)[1] == (
        f"4 GPUs at once: {missing} of 28 pairs were never measured: {named}",
        "4 GPUs at once: 1 dead links, never used: n7 to n4",
        "4 GPUs at once: n5 to n7 has 3.03 GB/s, 3.0 times as much as the other way",
    )
    alone = [replace(link, gpus_at_once=1) for link in links]
    assert all(note.startswith("1 GPU at a time: ") for note in matrices_of(alone)[1])


def test_repeats_are_pooled_over_pairs() -> None:
    """Pairs measured in one, two and three runs; twice in one run is once. Of 9 and 11 each is a tenth off
    their mean, of 8, 10 and 12 two are a fifth off, with one freedom more."""

    def link(pair: str, rate: float, run: str) -> Link:
        return Link(sender=pair[0], receiver=pair[1], bytes_per_s=rate * 1e9, run=run, date=f"2026-01-0{run}")

    links = [
        link("ab", 9, "1"),
        link("ab", 11, "2"),
        link("bc", 8, "1"),
        link("bc", 10, "2"),
        link("bc", 12, "3"),
    ]
    (matrix,), _ = matrices_of(links)
    assert matrix.spread == pytest.approx(math.sqrt((2 * 0.1**2 + 2 * 0.2**2) / 3), abs=1e-5)
    assert (matrix.repeats, matrix.date) == (2, "2026-01-03")
    (more,), _ = matrices_of([*links, link("ac", 6, "1"), link("ac", 8, "1")])
    assert (more.spread, more.repeats, more.rate(0, 2)) == (matrix.spread, 1, 7e9)
