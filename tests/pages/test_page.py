"""Pages: what they show is what `predict` says, hostile names stay text, and a real browser opens them."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mist_megatron as mm
from mist_megatron.events.iteration import Simulation
from mist_megatron.pages.views import page_html, timeline

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "gpt3-7b-2x8-l4" / "plan.yaml"
HOSTILE = "</script><img src=x onerror=alert(1)>'\"{{7*7}}&amp;"
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Read(HTMLParser):
    """Figures by where they stand; fails on a tag that is not closed where it should be."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.facts: list[tuple[str, float]] = []
        self.terms: dict[str, list[tuple[str, float]]] = {}
        self.chart, self.tags, self.text = "", set[str](), ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        at = {key: value or "" for key, value in attrs}
        self.tags.add(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.chart = at.get("data-chart", self.chart)
        if "data-fact" in at:
            self.facts.append((at["data-fact"], float(at["data-value"])))
        if "data-term" in at:
            self.terms.setdefault(self.chart, []).append((at["data-term"], float(at["data-value"])))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def reported() -> mm.Reported:
    return mm.report(RECIPE)


def test_figures_are_those_of_predict(reported: mm.Reported) -> None:
    told, read = mm.predict(RECIPE).to_dict(), Read(reported.html)
    facts = dict(read.facts)
    assert facts["s per step"] == told["iteration_s"]
    assert facts["tokens/s"] == told["tokens_per_s"]
    assert facts["fullest GPU"] == max(stage["peak_memory_bytes"] for stage in told["stages"])
    for chart, key in (
        ("device_memory", "memory"),
        ("stable", "stable_terms_s"),
        ("delta", "delta_terms_s"),
    ):
        wanted = [
            (name.replace("_", " "), value)
            for stage in told["stages"]
            for name, value in stage[key].items()
            if value
        ]
        assert sorted(read.terms[chart]) == sorted(wanted)
    host = sum(value for _, value in read.terms["host_memory"])
    assert host == pytest.approx(sum(stage["host_bytes"] for stage in told["stages"]), rel=1e-12)
    assert len(reported.html.encode()) < 2 << 20
    assert not {"img", "link", "iframe"} & read.tags
    assert "://" not in reported.html


def test_the_timeline_is_that_of_simulate(reported: mm.Reported) -> None:
    played, line = mm.simulate(RECIPE).simulation, reported.page.plans[0].timeline
    numbers = line.numbers
    assert len(numbers) // 5 == sum(
        round(end * 1e6) > round(start * 1e6)
        for start, end in zip(played.timeline.start_s, played.timeline.end_s, strict=True)
    )
    forward_us = sum(
        numbers[at + 4] for at in range(0, len(numbers), 5) if line.kinds[numbers[at + 1]] == "forward"
    )
    forward_s = sum(
        played.timeline.end_s[event] - played.timeline.start_s[event]
        for event, kind in enumerate(played.built.kind)
        if kind == "forward"
    )
    assert forward_us / 1e6 == pytest.approx(forward_s, rel=1e-4)


def test_a_long_step_is_drawn_with_fewer_bars() -> None:
    played: Simulation = mm.simulate(RECIPE).simulation
    whole = timeline(played)
    joined = timeline(played, 4000)
    assert len(joined.numbers) // 5 <= 4000 < len(whole.numbers) // 5
    assert "neighbours" in joined.note
    assert joined.span_us <= whole.span_us


def test_hostile_names_stay_text(reported: mm.Reported) -> None:
    plan = mm.load_plan(RECIPE)
    plan = replace(plan, model=replace(plan.model, name="m" + HOSTILE))
    page = replace(reported.page, title=HOSTILE, files=(HOSTILE,), next_steps=(HOSTILE,))
    for html in (mm.report(plan).html, page_html(page)):
        read = Read(html)
        assert "img" not in read.tags
        assert HOSTILE in read.text


def test_several_plans_stand_side_by_side(ran_here, tmp_path: Path) -> None:
    other = ROOT / "recipes" / "gpt3-1.3b-1x8-l4" / "plan.yaml"
    ran = ran_here("report", str(RECIPE), str(other), "--out", "two.html", "--json")
    assert ran.code == 0, ran.err
    html = (tmp_path / "two.html").read_text()
    told = json.loads(ran.out)["plans"]
    assert [value for name, value in Read(html).facts if name == "s per step"] == [
        plan["s per step"] for plan in told
    ]
    assert told[1]["s per step"] == mm.predict(other).iteration_s
    table = html[html.index("Side by side") :].partition("</table>")[0]
    rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.S) for row in table.split("<tr>")[1:]]
    cells = {row[0]: row[1:] for row in rows}
    page = mm.report([RECIPE, other]).page
    for place, fact in enumerate(page.plans[0].facts):
        assert list(map(unescape, cells[fact.name])) == [plan.facts[place].words for plan in page.plans]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("absent.yaml",), "does not exist"),
        ((str(RECIPE), "--out", "no/x.html"), "there is no folder no"),
        ((str(RECIPE),) * 9, "wanted 1 to 8"),
    ],
)
def test_refusals(ran_here, arguments: tuple[str, ...], said: str) -> None:
    ran = ran_here("report", *arguments)
    assert (ran.code, "Traceback" in ran.err) == (2, False)
    assert said in ran.err


def test_tune_reports_what_it_found(ran_here, tmp_path: Path) -> None:
    job = ("--model", "gpt3-1.3b", "--gpus", "2", "--gpu", "l4-24gb", "--global-batch", "16")
    ran = ran_here("tune", *job, "--space", "megatron", "--report", "r.html", "--json")
    assert ran.code == 0, ran.err
    told, html = json.loads(ran.out), (tmp_path / "r.html").read_text()
    read = Read(html)
    assert dict(read.facts)["s per step"] == told["prediction"]["iteration_s"]
    assert dict(read.facts)["tokens/s"] == told["prediction"]["tokens_per_s"]
    assert len(told["others"]) <= 1  # --top as it was, though the page shows more
    for words in ("(chosen)", "the best plan there", "--gpus-per-node 2", "proved", "To start it"):
        assert words in html
    refused = ran_here("tune", *job, "--report", "no/r.html")
    assert (refused.code, "no folder no" in refused.err) == (2, True)


DRIVER = """
<script>
window.failures = [];
window.addEventListener("error", (e) => failures.push(e.message));
window.addEventListener("load", () => {
  const fail = (what) => failures.push(what);
  const dark = getComputedStyle(document.body).backgroundColor;
  document.getElementById("theme").click();
  if (getComputedStyle(document.body).backgroundColor === dark) fail("one theme only");
  document.getElementById("open").click();
  document.querySelectorAll("details").forEach((part) => { if (!part.open) fail("a table stays shut"); });
  document.querySelectorAll("canvas.timeline").forEach((canvas) => {
    const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
    const picture = () => canvas.toDataURL();
    const whole = picture();
    ["+", "+", "ArrowRight"].forEach(press);
    if (picture() === whole) fail("no zoom");
    press("n");
    if (!canvas.nextElementSibling.textContent.includes("stage 0")) fail("nothing is said of a bar");
    press("0");
    const box = canvas.getBoundingClientRect();
    const middle = { clientX: box.left + box.width / 2, clientY: box.top + 30 };
    canvas.dispatchEvent(new PointerEvent("pointermove", middle));
    const ink = canvas.getContext("2d").getImageData(200, 24, canvas.width - 220, canvas.height - 30).data;
    if (!ink.some((value) => value)) fail("nothing is drawn");
  });
  if (document.documentElement.scrollWidth > window.innerWidth) fail("wider than the window");
  document.documentElement.dataset.failures = JSON.stringify(failures);
});
</script>
"""


@pytest.fixture(scope="module")
def browser() -> str:
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        pytest.skip("Chromium starts in no limited address space (ulimit -v)")
    for name in BROWSERS:
        if (found := shutil.which(name)) is not None:
            return found
    pytest.skip("no Chromium here (Debian: apt-get install chromium-headless-shell)")


@pytest.mark.parametrize("width", [500, 1400])
def test_a_browser_opens_every_part(reported: mm.Reported, browser: str, tmp_path: Path, width: int) -> None:
    page = tmp_path / "page.html"
    page.write_text(reported.html.replace("<body>", f"<body>{DRIVER}"), "utf-8")
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},900",
        "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert 'data-failures="[]"' in done.stdout, done.stdout[:300] + done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr
