"""`calibrate fit` and `show`: known hardware is found again, gaps are told, contradictions are refused."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from short_form import long_form

from mist_megatron.calibrate.agreement import device_is
from mist_megatron.spec.catalogue import gpu

PEAK, MEMORY = 989.4e12, 4.8e12  # NVIDIA's datasheet of the H200
CONDITIONS = {
    "id": "a", "device": "NVIDIA H200", "backend": "cuda", "precision": "bf16", "date": "2026-11-21",
              "versions": {"torch": "2.9.0"}, "clock_mhz": 1980}  # fmt: skip
TRUTH: dict[str, float] = {
    "gemm_peak_fraction": 0.7, "gemm_half_area": 9e5, "gemm_half_depth": 120.0,
    "attention_forward_fraction": 0.5, "attention_backward_fraction": 0.4, "attention_half_seq": 700.0,
    "memory_fraction": 0.82, "memory_latency_s": 3e-6, "launch_s": 5e-6, "h2d_bytes_per_s": 54e9,
    "d2h_bytes_per_s": 51e9, "both_bytes_per_s": 40e9, "host_adam_parameters_per_s": 6e8,
    "adam_bytes_per_parameter": 28.0,
}  # fmt: skip


def wiggle(number: int) -> float:
    """Noise of 2 %, the same in every run."""
    return 1.0 + 0.02 * math.sin(12.9898 * number)


def measured() -> list[dict[str, object]]:
    """A device that follows the curves of TRUTH exactly, but for noise."""
    t = TRUTH
    lines: list[dict[str, object]] = [{"kind": "launch", "seconds": t["launch_s"]}]
    for m, n, k in itertools.product((256, 1024, 4096, 8192), (1024, 4096, 8192), (128, 512, 2048, 8192)):
        busy = 2 * m * n * k / (PEAK * t["gemm_peak_fraction"])
        busy *= (1 + t["gemm_half_area"] / (m * n)) * (1 + t["gemm_half_depth"] / k)
        lines.append(
            {"kind": "gemm", "m": m, "n": n, "k": k, "batch": 1, "seconds": max(busy, t["launch_s"])}
        )
    for batch, seq in itertools.product((1, 4), (1024, 2048, 4096, 16384)):
        sizes = {"batch": batch, "seq": seq, "heads": 32, "kv_heads": 8, "head_dim": 128}
        flops = 2 * batch * 32 * seq * seq * 128 * (1 + t["attention_half_seq"] / seq) / PEAK
        forward, backward = t["attention_forward_fraction"], t["attention_backward_fraction"]
        lines.append({"kind": "attention_forward", **sizes, "seconds": flops / forward})
        lines.append({"kind": "attention_backward", **sizes, "seconds": 2.5 * flops / backward})
    for power in range(20, 32):
        seconds = 2**power / (MEMORY * t["memory_fraction"]) + t["memory_latency_s"]
        lines.append({"kind": "memory", "moved_bytes": 2**power, "seconds": seconds})
    for way, power in itertools.product(("h2d", "d2h", "both"), range(16, 31)):
        seconds = 2**power / t[f"{way}_bytes_per_s"] + (8e-6 if way != "both" else 0.0)
        lines.append({"kind": "copy", "direction": way, "bytes": 2**power, "seconds": seconds})
    for millions in (10, 100, 1000):
        lines.append({"kind": "host_adam", "parameters": millions * 1e6, "seconds": millions * 1e6 / 6e8})
        rate = MEMORY * t["memory_fraction"] / t["adam_bytes_per_parameter"]
        lines.append({"kind": "device_adam", "parameters": millions * 1e6, "seconds": millions * 1e6 / rate})
    for ranks, power in itertools.product((2, 4, 8), range(12, 31)):
        # 12 us and 1.5 us for each of the 2 (n - 1) steps of a ring at 330 GB/s.
        seconds = 12e-6 + 1.5e-6 * 2 * (ranks - 1) + 2 * (ranks - 1) / ranks * 2**power / 330e9
        lines.append({"kind": "collective", "collective": "all_reduce", "bytes": 2**power, "ranks": ranks,
                      "nodes": 1, "seconds": seconds})  # fmt: skip
    for compute, up, down in itertools.product((0.0, 1e-3, 3e-3), repeat=3):
        if sum(value > 0.0 for value in (compute, up, down)) > 1:
            # Copies share one link; compute does not use it.
            lines.append({"kind": "overlap", "c_s": compute, "g2g_s": 0.0, "h2d_s": up, "d2h_s": down,
                          "seconds": max(compute, up + down)})  # fmt: skip
    for number, line in enumerate(lines):
        line |= {"of": "a", "seconds": float(line["seconds"]) * wiggle(number)}  # type: ignore[arg-type]
    return lines


def write(path: Path, lines: list[dict[str, object]], **conditions: object) -> Path:
    head = {"conditions": {**CONDITIONS, **conditions}}
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *lines]))
    return path


FIT = ("calibrate", "fit", "raw.jsonl", "--gpu", "h200-sxm-141gb", "--out", "node.yaml")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    """A fitted profile and what `fit --json` said of it; made in this process, once."""
    from command_line import run

    folder = tmp_path_factory.mktemp("fit")
    raw = write(folder / "raw.jsonl", measured())
    out = folder / "node.yaml"
    capture = folder / "said.json"
    with capture.open("w") as file, pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", file)
        code = run(["calibrate", "fit", str(raw), "--gpu", "h200-sxm-141gb", "--out", str(out), "--json"])
    assert code == 0
    return out, json.loads(capture.read_text())


def test_known_hardware_is_found_again(fitted):
    _, said = fitted
    found = {figure["name"]: figure for figure in said["figures"]}
    for name, truth in TRUTH.items():
        tolerance = 0.2 if "half" in name or "latency" in name else 0.04
        assert found[name]["value"] == pytest.approx(truth, rel=tolerance), name
        assert (found[name]["origin"], found[name]["points"] > 0) == ("measured", True)
    for name in ("gemm_peak_fraction", "attention_half_seq", "memory_fraction", "h2d_bytes_per_s"):
        assert 0.0 < found[name]["error"] < 0.03  # the noise that was put in, seen on shapes held out
    assert found["intra_fraction"]["value"] == pytest.approx(330 / 450, rel=0.02)
    assert found["intra_hop_latency_s"]["value"] == pytest.approx(1.5e-6, rel=0.2)
    assert found["clock_mhz"]["value"] == 1980


def test_collectives_and_what_follows_from_them(fitted):
    _, said = fitted
    curves = {(c["kind"], c["ranks"]): c for c in said["collectives"]}
    assert curves["all_reduce", 8]["bytes_per_s"] == pytest.approx(330e9, rel=0.02)
    assert curves["all_reduce", 8]["latency_s"] == pytest.approx(33e-6, rel=0.1)
    assert curves["all_reduce", 8]["error"] < 0.05
    # A ring all-reduce is a scatter and a gather, each at the same rate with half the steps.
    assert curves["all_gather", 8]["latency_s"] == pytest.approx(16.5e-6, rel=0.1)


def test_copies_that_share_a_link_slow_each_other_down(fitted):
    _, said = fitted
    sets = {"+".join(item["streams"]): item for item in said["interference"]}
    pair = sets["H2D+D2H"]
    assert sum(1.0 / factor for factor in pair["factors"]) == pytest.approx(1.0, abs=0.06)
    assert (pair["origin"], pair["points"]) == ("measured", 4)
    assert all(0.0 <= sigma < 1.0 for sigma in sets["C+H2D"]["sigma"])
    assert sets["C+G2G"]["origin"] == "assumed"  # one GPU alone has nobody to send to: the base's


def test_what_was_not_measured_is_the_base_and_a_gap(fitted):
    _, said = fitted
    found = {figure["name"]: figure for figure in said["figures"]}
    assert found["inter_fraction"]["origin"] == "assumed"
    assert "h200-sxm-141gb" in said["note"]
    gaps = "\n".join(said["gaps"])
    assert "inter_fraction" in gaps
    assert "no collective between nodes" in gaps
    assert "send_recv inside a node" in gaps
    assert "no operator table" not in gaps
    assert "gemm_peak_fraction" not in gaps
    assert "NVIDIA H200" in said["sources"]["measured"]["text"]


def test_fitted_profile_predicts_its_own_measurements(fitted):
    """Read back by the cost model: an exact shape is the measured time, a new one the true curve's."""
    import numpy as np

    from mist_megatron.calibrate.profiles import load_profile
    from mist_megatron.price.prices import Gemm
    from mist_megatron.price.profile_prices import prices_of
    from mist_megatron.spec.cluster import cluster_of

    prices = prices_of(load_profile(fitted[0]), cluster_of(gpu("h200-sxm-141gb"), 8, 8), "bf16")
    one, sizes = np.ones(1), [np.array([value]) for value in (3000.0, 6000.0, 3000.0)]
    priced = prices.of(Gemm(*sizes, one))
    m, n, k = 3000, 6000, 3000
    truth = 2 * m * n * k / (PEAK * 0.7) * (1 + 9e5 / (m * n)) * (1 + 120 / k)
    assert priced.seconds[0] == pytest.approx(truth, rel=0.04)
    exact = prices.of(Gemm(4096 * one, 4096 * one, 2048 * one, one))
    assert exact.exact_s[0] == exact.seconds[0]


def test_shapes_are_predicted_from_the_others(fitted):
    """What is true by construction within 2 % is told as such; the fit's curve and its table both know it."""
    told = next(note for note in fitted[1]["notes"] if note.startswith("gemm in bf16: 48 shapes"))
    by_table, by_curve = map(float, re.findall(r" ([\d.]+)%", told))
    assert 0.0 < by_table < 3.0
    assert 0.0 < by_curve < 3.0


def test_hot_points_are_left_out_and_clocks_are_of_products(ran_here, tmp_path):
    lines = [{**line, "clock_mhz": 1500 if line["kind"] == "gemm" else 1980} for line in measured()]
    hot = {**GEMM, "seconds": 9e-3, "overheated": True}
    write(tmp_path / "raw.jsonl", [*lines, hot])
    said = json.loads(ran_here(*FIT, "--json").out)
    assert "1 points of an overheated device left out" in said["notes"]
    assert next(f["value"] for f in said["figures"] if f["name"] == "clock_mhz") == 1500
    write(tmp_path / "raw.jsonl", [hot])
    refused = ran_here(*FIT, "--force")
    assert (refused.code, "overheated" in refused.err) == (2, True)


def test_no_share_above_one(ran_here, tmp_path):
    """Small shapes in a cache can be faster than a curve that fits them allows."""
    small = [{"kind": "memory", "moved_bytes": 1 << power, "seconds": (1 << power) / 9e12, "of": "a"}
             for power in range(16, 28)]  # fmt: skip
    write(tmp_path / "raw.jsonl", small)
    figures = json.loads(ran_here(*FIT, "--json").out)["figures"]
    assert next(f["value"] for f in figures if f["name"] == "memory_fraction") == 1.0


def test_pairs_of_nodes_alone_make_no_profile(ran_here, tmp_path):
    pair = {
        "kind": "link",
        "direction": "send",
        "bytes": 1 << 20,
        "row": 0,
        "column": 1,
        "seconds": 5e-5,
        "of": "a",
    }
    write(tmp_path / "raw.jsonl", [pair], device="network", backend="mpigraph")
    ran = ran_here(*FIT)
    assert (ran.code, "only bandwidths between pairs" in ran.err) == (2, True)


@long_form
def test_fit_is_reproducible_and_needs_force(ran_here, tmp_path):
    write(tmp_path / "raw.jsonl", measured())
    assert ran_here(*FIT).code == 0
    first = {path.name: path.read_bytes() for path in tmp_path.glob("node*")}
    assert {"node.yaml", "node.gemm.csv.gz", "node.attention_backward.csv.gz"} <= set(first)
    again = ran_here(*FIT)
    assert (again.code, "--force" in again.err) == (2, True)
    assert ran_here(*FIT, "--force").code == 0
    assert {path.name: path.read_bytes() for path in tmp_path.glob("node*")} == first
    assert not list(tmp_path.glob(".node*"))


def test_fit_on_top_of_a_fit_keeps_both_sources(fitted, ran_here, tmp_path):
    faster = [{"kind": "copy", "direction": "h2d", "bytes": 2**p, "seconds": 2**p / 57e9, "of": "a"}
              for p in range(20, 31)]  # fmt: skip
    write(tmp_path / "raw.jsonl", faster, date="2026-12-01")
    ran = ran_here(*FIT, "--base", str(fitted[0]), "--json")
    assert ran.code == 0
    said = json.loads(ran.out)
    found = {figure["name"]: figure for figure in said["figures"]}
    assert (found["h2d_bytes_per_s"]["source"], found["d2h_bytes_per_s"]["source"]) == (
        "measured", "base measured",
    )  # fmt: skip
    assert found["h2d_bytes_per_s"]["value"] == pytest.approx(57e9, rel=0.01)
    assert found["gemm_peak_fraction"]["value"] == pytest.approx(0.7, rel=0.04)
    assert "2026-12-01" in said["sources"]["measured"]["text"]
    assert "2026-11-21" in said["sources"]["base measured"]["text"]


def copy_line(gb_per_s: float, way: str = "h2d") -> dict[str, object]:
    return {
        "kind": "copy",
        "direction": way,
        "bytes": 1 << 30,
        "seconds": (1 << 30) / gb_per_s / 1e9,
        "of": "a",
    }


GEMM = {"kind": "gemm", "m": 4096, "n": 4096, "k": 4096, "batch": 1, "seconds": 2e-4, "of": "a"}
Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("spoil", "code", "told"),
    [
        (lambda f: write(f, [copy_line(5000.0)]), 2, "line 2: h2d moves 5,000 GB/s"),
        (lambda f: write(f, [copy_line(300.0, "d2h")]), 2, "line 2: d2h copy at 300 GB/s, above PCIe 5"),
        (lambda f: write(f, [{**GEMM, "seconds": -1.0}]), 2, "line 2: gemm took -1 s"),
        (lambda f: write(f, [{**GEMM, "seconds": 1e-6}]), 2, "line 2"),
        (lambda f: write(f, [{**GEMM, "seconds": 1e-4}]), 2, "above h200-sxm-141gb's peak"),
        (lambda f: write(f, [GEMM, {**GEMM, "seconds": 2e-3}]), 2, "one of them is wrong"),
        (lambda f: f.write_text(write(f, [GEMM]).read_text()[:-20]), 2, "line 2: not a JSON object: cut"),
        (lambda f: write(f, []), 2, "no measurements"),
        (lambda f: write(f, [{**GEMM, "of": "b"}]), 2, "which no conditions line before it describes"),
        (lambda f: write(f, [GEMM], device="NVIDIA L4"), 2, "'NVIDIA L4', which is not h200-sxm-141gb"),
        (lambda f: write(f, [GEMM], device="NVIDIA H200 NVL"), 2, "which is not h200-sxm-141gb"),
        (lambda f: write(f, [GEMM], device="unknown"), 2, "is not said"),
        (lambda f: write(f, [GEMM], device="AMD EPYC", backend="cpu"), 2, "--rehearsal"),
        (lambda f: write(f, [{**GEMM, "m": 4096.5}]), 2, "line 2: m is 4096.5; wanted a whole number"),
        (lambda f: write(f, [{"conditions": {**CONDITIONS, "device": "NVIDIA L4"}}]), 2, "others before"),
        (lambda f: write(f, [{**GEMM, "kind": "gem"}]), 2, "line 2: kind is 'gem'"),
    ],
)  # fmt: skip
def test_wrong_measurements_are_refused(ran_here, tmp_path, spoil: Change, code: int, told: str):
    spoil(tmp_path / "raw.jsonl")
    ran = ran_here(*FIT)
    assert (ran.code, "Traceback" in ran.err) == (code, False)
    assert told in ran.err
    assert not (tmp_path / "node.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("--base", "l4-24gb"), 4, "base profile is of l4-24gb, wanted one of h200-sxm-141gb"),
        (("--base", "nothing"), 4, "no profile 'nothing'"),
        (("--name", "a b"), 2, "--name"),
        (("--gpu", "h200-sxm-114gb"), 2, "did you mean"),
        (("--out", "node.txt"), 2, "ends in .yaml"),
        (("slow.jsonl",), 2, "wanted clocks within 10%"),
    ],
)
def test_wrong_requests_are_refused(ran_here, tmp_path, arguments, code, told):
    write(tmp_path / "raw.jsonl", [GEMM])
    write(tmp_path / "slow.jsonl", [GEMM], clock_mhz=1200)
    ran = ran_here(*FIT, *arguments)
    assert (ran.code, "Traceback" in ran.err) == (code, False)
    assert told in ran.err


@pytest.mark.parametrize(
    ("device", "name", "same"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", True),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-80gb", False),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb", True),
        ("NVIDIA A100 80GB PCIe", "a100-sxm-80gb", False),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb", True),
        ("NVIDIA H100 PCIe", "h100-sxm-80gb", False),
        ("NVIDIA GH200 480GB", "h200-sxm-141gb", False),
        ("NVIDIA L40S", "l4-24gb", False),
        ("NVIDIA L4", "l4-24gb", True),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb", True),
        ("NVIDIA A10G", "a10g-24gb", True),
        ("NVIDIA B200", "b200-sxm-180gb", True),
        ("NVIDIA GB200", "b200-sxm-180gb", False),
    ],
)
def test_device_names_of_drivers(device, name, same):
    assert device_is(device, gpu(name)) is same


def test_show_fits_80_columns_and_names_origins(fitted, ran_here):
    ran = ran_here("calibrate", "show", str(fitted[0]))
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    line = next(line for line in ran.out.splitlines() if line.startswith("gemm_peak "))
    assert line.split()[2:5] == ["%", "measured", "measured"]
    assert all(word in ran.out for word in ("gaps", "sources", "all_reduce", "C+H2D+D2H", "NVIDIA H200"))


def test_show_draws_the_curves(fitted, ran_here, tmp_path):
    ran = ran_here("calibrate", "show", str(fitted[0]), "--plot", "pictures", "--json")
    pictures = [Path(path).name for path in json.loads(ran.out)["plots"]]
    assert pictures == [
        "node.gemm.svg", "node.all_gather.svg", "node.all_reduce.svg", "node.reduce_scatter.svg",
        "node.interference.svg",
    ]  # fmt: skip
    for name in pictures:
        root = ElementTree.parse(tmp_path / "pictures" / name).getroot()
        drawn = [item for item in root.iter() if item.tag.endswith(("}path", "}use"))]
        assert len(drawn) >= 5
    gemm = (tmp_path / "pictures" / "node.gemm.svg").read_text()
    assert gemm.count("fill-opacity: 0.6") >= 48  # one for each measured shape


def test_list_names_every_shipped_profile(ran_here):
    shipped = {path.stem for path in (Path(__file__).parents[2] / "calibration/profiles").glob("*.yaml")}
    ran = ran_here("calibrate", "--json")
    assert {item["name"] for item in json.loads(ran.out)["profiles"]} == shipped
    assert max(map(len, ran_here("calibrate", "list").out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (("h200",), 4, "no profile 'h200'"),
        (("absent.yaml",), 2, "does not exist"),
        (("changed.yaml",), 4, "content hash"),
        (("torn.yaml",), 4, "cut off"),
        (("empty.yaml",), 4, "empty"),
        (("l4-24gb", "--plot", "empty.yaml"), 2, "is a file"),
    ],
)
def test_show_refuses(fitted, ran_here, tmp_path, arguments, code, told):
    for path in fitted[0].parent.glob("node.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = fitted[0].read_text()
    (tmp_path / "changed.yaml").write_text(text.replace("value: 1980", "value: 1981"))
    (tmp_path / "torn.yaml").write_text(text)
    (tmp_path / "empty.yaml").write_text("")
    table = tmp_path / "node.gemm.csv.gz"
    if arguments == ("torn.yaml",):
        table.write_bytes(table.read_bytes()[:60])
    ran = ran_here("calibrate", "show", *arguments)
    assert (ran.code, "Traceback" in ran.err) == (code, False)
    assert told in ran.err
