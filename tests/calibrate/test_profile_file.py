"""Shipped profiles read back, and damaged ones are refused with what is wrong."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from short_form import one_of

from mist_megatron.calibrate.profile_view import gaps
from mist_megatron.calibrate.profiles import load_profile, write_profile
from mist_megatron.errors import ProfileError
from mist_megatron.formats.profile_yaml import profile_from_text
from mist_megatron.price.datasheet import datasheet_profile
from mist_megatron.resources import data_folder
from mist_megatron.spec.catalogue import CATALOGUE

FOLDER = data_folder("calibration") / "profiles"
SHIPPED = sorted(FOLDER.glob("*.yaml"))
WANTED = {
    "l4-24gb", "a10g-24gb", "v100-sxm-32gb", "a100-sxm-40gb", "a100-sxm-80gb", "a100-pcie-80gb",
    "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "gb200-186gb",
}  # fmt: skip


def table_of(folder: Path):
    return lambda name: (folder / name).read_bytes()


def test_all_promised_profiles_are_shipped() -> None:
    assert {path.stem for path in SHIPPED} >= WANTED


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_profile_is_sound(path: Path) -> None:
    profile = load_profile(path)
    assert profile.name == path.stem
    assert profile.gpu in CATALOGUE
    text = path.read_text()
    assert profile.content_hash in text
    assert "/work" not in text and "/tmp" not in text


@pytest.fixture
def document() -> dict:
    return yaml.safe_load((FOLDER / "l4-24gb.yaml").read_text())


def read(document: dict, table=None):
    document.pop("content_hash", None)
    return profile_from_text(yaml.safe_dump(document), "mine.yaml", table or table_of(FOLDER))


def test_a_hand_edited_profile_is_noticed() -> None:
    text = (FOLDER / "l4-24gb.yaml").read_text()
    edited = text.replace("ranks: 8", "ranks: 7", 1)
    assert edited != text
    with pytest.raises(ProfileError, match="content hash"):
        profile_from_text(edited, "mine.yaml", table_of(FOLDER))


def test_content_hash_covers_the_tables(document: dict) -> None:
    before = read(document).content_hash

    def other(name: str) -> bytes:
        data = gzip.decompress((FOLDER / name).read_bytes()).decode()
        head, first, rest = data.split("\n", 2)
        values = first.split(",")
        values[-1] = repr(float(values[-1]) * 2)
        return gzip.compress("\n".join([head, ",".join(values), rest]).encode())

    assert read(document, other).content_hash != before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["kernels"]["launch_s"].update(source="nowhere"), "nowhere"),
        (lambda d: d["kernels"]["launch_s"].pop("source"), "source"),
        (lambda d: d["kernels"]["launch_s"].update(value=-1.0), "-1.0"),
        (lambda d: d["host"]["h2d_bytes_per_s"].update(value=5000e9), "5,000 GB/s over PCIe"),
        (lambda d: d["collectives"][0].update(bytes_per_s=9e12), "check the units"),
        (lambda d: d["collectives"][0].update(latency_s=-1e-6), "latency_s"),
        (lambda d: d["interference"][0].update(factors=[0.5, 1.0]), "from 1 to 50"),
        (lambda d: d["interference"][0].update(points=-4), "wanted a count"),
        (lambda d: d["interference"][0].update(error=float("nan")), "error is nan"),
        (lambda d: d["sources"]["assumed"].pop("uncertainty"), "uncertainty"),
        (lambda d: d.update(schema=99), "schema is 99"),
        (lambda d: d.update(kernel={}), "unknown key kernel"),
        (lambda d: d["tables"][0].update(rows=7), "the profile says 7"),
    ],
)
def test_faults_are_named(document: dict, change, said: str) -> None:
    change(document)
    with pytest.raises(ProfileError) as caught:
        read(document)
    assert said in str(caught.value)
    assert "\n" not in caught.value.message


def test_a_table_of_whole_layers_is_refused_by_name(document: dict) -> None:
    """Profiles of before may hold one; nothing would read it."""
    document["tables"][0]["operator"] = "layer"
    with pytest.raises(ProfileError, match="operator 'layer' is unknown; known: gemm, "):
        read(document)


def test_a_truncated_table_is_refused(document: dict) -> None:
    with pytest.raises(ProfileError, match="cut off"):
        read(document, lambda name: (FOLDER / name).read_bytes()[:-30])


def test_a_table_with_a_negative_time_names_its_line(document: dict) -> None:
    def table(name: str) -> bytes:
        lines = gzip.decompress((FOLDER / name).read_bytes()).decode().splitlines()
        lines[2] = lines[2].rsplit(",", 1)[0] + ",-0.5"
        return gzip.compress("\n".join(lines).encode())

    with pytest.raises(ProfileError, match=r"line 3: .*wanted numbers above 0"):
        read(document, table)


@pytest.mark.parametrize("name", one_of(2, ["../../evil", "/evil", "..", ".hidden", "a/b\\c", "x" * 200]))
def test_pictures_stay_in_their_folder_whatever_the_profile_is_called(
    name: str, tmp_path: Path, ran_here
) -> None:
    profile = replace(datasheet_profile(CATALOGUE["a40-48gb"]), name=name)
    folder = tmp_path / "one" / "two"
    folder.mkdir(parents=True)
    write_profile(profile, folder / "theirs.yaml", force=False)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    ran = ran_here(
        "calibrate", "show", str(folder / "theirs.yaml"), "--plot", str(folder / "pictures"), "--json"
    )
    assert ran.code == 0, ran.err
    written = {path for path in tmp_path.rglob("*") if path.is_file()} - before
    assert {path.parent for path in written} == {folder / "pictures"}
    assert {str(path) for path in written} == set(json.loads(ran.out)["plots"])


def test_a_name_that_commands_the_terminal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="invisible character"):
        replace(datasheet_profile(CATALOGUE["a40-48gb"]), name="a\x1b[2Jb")


def test_typical_slowdowns_are_one_gap() -> None:
    gpu = CATALOGUE["a40-48gb"]
    told = [gap for gap in gaps(datasheet_profile(gpu), gpu) if "co-run" in gap]
    assert told == ["co-run slowdowns were not measured: typical ones are taken"]
