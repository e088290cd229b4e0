"""The HTML report: its contents for every kind of run folder, its limits, and how a browser displays it."""

import html.parser
import itertools
import json
import re
import subprocess
from types import SimpleNamespace

import pytest

from tests.support.browser import BROWSER, needs_browser
from tests.support.commands import refused
from tests.support.run_folders import (
    COMMAND,
    BrokenTask,
    PngTask,
    bad_and_gold,
    before_and_after,
    evaluation,
    png,
    write_run,
)
from tests.support.toy import ToyTask
from trl_grpo_tasks.commands import main as cli
from trl_grpo_tasks.commands import train as run
from trl_grpo_tasks.registry import TASKS, get_task
from trl_grpo_tasks.report import page as report
from trl_grpo_tasks.report.gallery import Pictures, best_and_worst, choose, key_of, pairs
from trl_grpo_tasks.report.page import write_report
from trl_grpo_tasks.report.plots import chart, nice_ticks
from trl_grpo_tasks.training import callbacks
from trl_grpo_tasks.training.callbacks import LiveReport

VOID = {"meta", "br", "img"}


class Balance(html.parser.HTMLParser):
    """A strict HTML parser: every element that is opened must be closed, in order. Collects text and tags."""

    def __init__(self, page):
        super().__init__()
        self.open, self.text, self.tags = [], [], []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, tag

    def handle_data(self, text):
        if self.open and self.open[-1] not in ("style", "script"):
            self.text.append(text)

    def count(self, tag, kind=""):
        return sum(t == tag and (not kind or kind in (a.get("class") or "").split()) for t, a in self.tags)


def page_of(folder, task=None, **options):
    page = write_report(folder, task or ToyTask(), **options).read_text()
    parsed = Balance(page)
    assert not re.search(r"https?://|@import|url\(|<link", page), "it must open without a network"
    return page, parsed, " ".join(" ".join(parsed.text).split())


def test_watched_components_have_a_tile_beside_the_reward(tmp_path, monkeypatch):
    write_run(tmp_path, evaluations=before_and_after())
    assert "not trained on" not in page_of(tmp_path)[0]
    monkeypatch.setattr(ToyTask, "watched", ("short",))
    tile = r"<div class='tile main'><small>short, not trained on</small><b[^>]*>.*?&rarr; </span>[\d.]+</b>"
    assert re.search(tile, page_of(tmp_path)[0])


def test_a_finished_run(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=before_and_after())
    page, parsed, text = page_of(folder)
    first, last = (one["metrics"] for one in json.loads((folder / "results.json").read_text())["evaluations"])
    assert f"{first['success']:.1%} → {last['success']:.1%}" in text
    for shown in ("finished: 40 steps", "2.5 min", "12,345", "cpu, fp32", "trl 1.16.0", COMMAND,
                  "Command and versions", "Columns: before: the model before training; GRPO: the trained model.",
                  "cut_off : share of samples that reached the length limit before their end"):  # fmt: skip
        assert shown in text, shown
    for name in ("reward", "rewards/success/mean", "rewards/match/mean", "kl", "entropy", "completions/mean_length",
                 "constraint/allowed_mass", "groups_without_signal", "beta", "curriculum/level", "step_time",
                 "perf/reward_seconds"):  # fmt: skip
        assert f"<code>{name}</code></figcaption><svg" in page, name
    assert "Constant during training: rewards/valid/mean 1" in text, "constant metrics are listed, not drawn"
    assert page.count("<title>step 7: ") >= 10 and "<title>before, k 4: " in page and "<title>GRPO, k 1: " in page
    assert parsed.count("div", "pair") == 8 and parsed.count("details") == 1 and parsed.count("dialog") == 1
    assert "4 improved" in text and "2 got worse" in text and "http-equiv" not in page


def test_a_run_that_is_still_training(tmp_path):
    folder = write_run(tmp_path, evaluations=before_and_after()[:1], steps=7, finished=False)
    with open(folder / "training_metrics.jsonl", "a") as file:
        file.write('{"step": 8, "rew')
    page, parsed, text = page_of(folder, running_to=40)
    assert "running: step 7 of 40" in text and "http-equiv=refresh" in page
    assert parsed.count("div", "pair") == 0 and parsed.count("figure", "sample") > 8 and "Samples: before" in text
    assert "not finished: step 7 of 40" in page_of(folder)[2]


def test_a_run_that_has_just_started(tmp_path):
    assert "There is no evaluation yet" in page_of(tmp_path)[2]
    _, parsed, text = page_of(write_run(tmp_path, steps=0))
    assert "no step logged yet" in text and "Fewer than two steps" in text and parsed.count("svg") == 0
    _, parsed, text = page_of(write_run(tmp_path))
    assert "There is no evaluation yet" in text and parsed.count("figure", "sample") == 0
    assert parsed.count("figure", "chart") >= 10 and "success in training" in text
    model = evaluation("model", ToyTask(), [("a", "b")] * 3)
    folder = write_run(tmp_path / "eval", evaluations=[model], steps=0, settings=False, results="evaluation.json")
    _, parsed, text = page_of(folder)
    assert "Samples: model" in text and parsed.count("figure", "sample") == 6 and "Command and versions" not in text


def test_nan_metrics_and_unscored_samples(tmp_path):
    """Python's JSON allows NaN."""
    made = before_and_after()
    for sample in made[1].samples:
        sample.score, sample.reason = None, "the worker died"
    made[1].metrics = dict.fromkeys(made[1].metrics, float("nan"))
    _, parsed, text = page_of(write_run(tmp_path, evaluations=made))
    assert "the worker died" in text and "nan" not in text.lower().split() and parsed.count("div", "pair") == 8


def test_what_a_model_writes_cannot_break_the_page(tmp_path):
    evil = "</pre></div><script>alert(1)</script>\ud800'\">"
    made = [evaluation(name, ToyTask(), [(evil, "a" + evil)] * 2) for name in ("before & <after>", "GRPO")]
    page, _, _ = page_of(write_run(tmp_path, evaluations=made))
    assert "<script>alert" not in page and "before &amp; &lt;after&gt;" in page


class ThinkingToy(ToyTask):
    thought_markers = ("####",)


def test_thoughts_are_folded_away_and_escaped(tmp_path):
    evil = "</details></pre><script>alert(1)</script>"
    samples = evaluation("model", ThinkingToy(), [(f"{evil}####a{evil}",), ("no marker",)])
    page, parsed, text = page_of(write_run(tmp_path, evaluations=[samples], steps=0), ThinkingToy())
    plain = page_of(tmp_path)[1]
    assert parsed.count("details") == plain.count("details") + 1 and ("details", {}) in parsed.tags
    assert "<script>alert" not in page and f"thought {evil} a{evil}" in text and "→ no marker" in text


# ---- pictures


def test_pictures_are_drawn_once_and_shown_as_data(tmp_path):
    drawn = []

    class Counting(PngTask):
        def render(self, row, completion):
            drawn.append((row["prompt"], completion))
            return super().render(row, completion)

    task = Counting()
    folder = write_run(tmp_path, evaluations=before_and_after(task))
    pictures = Pictures(task)
    page, parsed, _ = page_of(folder, task, pictures=pictures)
    assert len(drawn) == len(set(drawn)) == page.count("data:image/png;base64,") <= 24
    assert parsed.count("div", "text") == 0 and parsed.count("img") == len(drawn)
    once = len(drawn)
    page_of(folder, task, pictures=pictures)
    assert len(drawn) == once, "rewriting the page must not draw pictures again"


def test_a_page_has_a_bounded_size_and_time(tmp_path, monkeypatch):
    class Heavy(ToyTask):
        def render(self, row, completion):
            return png(1) + b"\0" * 700_000

    folder = write_run(tmp_path, evaluations=before_and_after())
    page, _, text = page_of(folder, Heavy())
    assert 2_000_000 < len(page) < 6_000_000 and "picture omitted to limit the size of this page" in text
    monkeypatch.setattr(report, "SECONDS", -1)
    _, parsed, text = page_of(folder, Heavy())
    assert "not drawn" in text and parsed.count("img") == 0


def test_a_task_that_cannot_draw_leaves_a_note(tmp_path):
    page, _, text = page_of(write_run(tmp_path, evaluations=before_and_after()), BrokenTask())
    assert "cannot be drawn: RuntimeError: no <b>ink</b> left" in text and "<b>ink" not in page
    assert "render returned NoneType instead of bytes or str" in text


@pytest.mark.parametrize("name", sorted(TASKS))
def test_every_built_in_task_is_drawn(tmp_path, name):
    task = get_task(name)
    made = bad_and_gold(task, task.dataset("test", 1, 0))
    page = write_report(write_run(tmp_path, evaluations=made), task).read_text()
    assert "cannot be drawn" not in page and page.count("<figure class='sample") == 2 and "0.0% &rarr;" in page
    assert page.count("src='data:image/png") + page.count("<div class=paper>") == 2


# ---- which samples


def test_improved_worse_and_unchanged_rows_are_shown_in_proportion():
    found = pairs(*(one.as_dict() for one in before_and_after(count=60)))
    kinds = [pair.verdict for pair in found]
    assert [kinds.count(kind) for kind in ("better", "worse", "same")] == [20, 10, 30]
    chosen = [pair.verdict for pair in choose(found, 8)]
    assert [chosen.count(kind) for kind in ("better", "worse", "same")] == [3, 1, 4]
    assert len(choose(found[:5], 8)) == 5


def test_best_and_worst_samples_are_disjoint_and_not_among_those_already_shown():
    after = before_and_after(count=12)[1].as_dict()
    shown = {key_of(after["samples"][0])}
    best, worst = best_and_worst(after, 4, shown)
    keys = [key_of(sample) for sample in best + worst]
    assert len(set(keys)) == 8 and not shown & set(keys)
    assert all(s["score"]["success"] for s in best) and not any(s["score"]["success"] for s in worst)


# ---- charts


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.466, 0.591), (-3, 4000), (9e-6, 5e-4), (1, 1.0001)])
def test_ticks_are_round_and_contain_the_range(low, high):
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low and ticks[-1] >= high and 3 <= len(ticks) <= 7
    assert all(len(f"{tick:.6g}") <= 8 for tick in ticks)


def test_points_are_where_they_should_be_and_long_curves_are_thinned_and_smoothed():
    drawn = chart("t", {"a": [(step, step % 2) for step in range(10_000)]})
    assert drawn.count("<polyline") == 2 and drawn.count("<title>") <= 150 and len(drawn) < 60_000
    assert chart("t", {}) == "" and "<svg" in chart("t", {"a": [(3, 0.0)]})
    points = re.search(r"points='([^']*)'", chart("t", {"a": [(0, 0.0), (10, 1.0)]}))[1].split()
    (x0, y0), (x1, y1) = (map(float, point.split(",")) for point in points)
    assert x0 < x1 == 330 and y0 == 200 - 34 and y1 == 8


# ---- the command `report`, and the report of a run that is still training


def test_the_command_finds_a_built_in_task_by_itself(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(TASKS, "tests.support.toy", "tests.support.toy")
    folder = write_run(tmp_path / "run", evaluations=before_and_after())
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html") and (folder / "report.html").is_file()
    (folder / "settings.json").unlink()
    assert cli.main(["report", str(folder), "--task", "tests.support.toy"]) == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "folder not found; pass the --output_dir of a run"),
        (lambda folder: folder.mkdir(), "is not a run folder"),
        (lambda folder: write_run(folder, settings=False), "does not name the task that was trained"),
        (lambda folder: (write_run(folder) / "results.json").write_text("{"), "results.json is not valid JSON"),
        (
            lambda folder: (write_run(folder) / "settings.json").write_text(
                json.dumps({"task": {"name": "brick", "options": {"bricks_of_old": 1}}, "run": {"task": "brick"}})
            ),
            "contains options that task 'brick' no longer has",
        ),
    ],
)
def test_folders_that_the_command_rejects(tmp_path, capsys, make, message):
    make(tmp_path / "run")
    assert message in refused(capsys, "report", tmp_path / "run")


def test_the_page_is_refreshed_but_not_too_often(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    folder, said = write_run(tmp_path, finished=False), []
    args, state = SimpleNamespace(output_dir=str(folder)), SimpleNamespace(is_world_process_zero=True, max_steps=50)
    written = []

    def slow(*a, **k):
        written.append(now[0])
        now[0] += 3.0
        return write_report(*a, **k)

    monkeypatch.setattr(callbacks, "write_report", slow)
    live = LiveReport(ToyTask(), Pictures(ToyTask()), say=said.append)
    live.on_train_begin(args, state, None)
    while now[0] < 1000:
        live.on_log(args, state, None, logs={})
        live.on_save(args, state, None)
        now[0] += 1.0
    gaps = [b - a for a, b in itertools.pairwise(written)]
    assert written[0] == 60 and min(gaps) >= 150, "writing the page may take at most 2% of the time"
    assert "running: step 40 of 50" in (folder / "report.html").read_text() and not said
    (folder / "results.json").write_text("{")
    now[0] += 1000
    live.on_log(args, state, None)
    live.on_log(args, state, None)
    assert len(said) == 1 and "training continues" in said[0]


def test_a_training_run_refreshes_its_page(tmp_path, monkeypatch):
    from tests.commands.test_train import words

    seen = []
    monkeypatch.setattr(LiveReport.__init__, "__defaults__", (0.0, print))
    monkeypatch.setattr(
        callbacks, "write_report", lambda *a, **k: (seen.append(k["running_to"]), write_report(*a, **k))[1]
    )
    assert run.main(words(tmp_path, eval_before_and_after=False, model_revision="v1")) == 0
    assert seen and set(seen) == {3}
    assert "finished: 3 steps" in (tmp_path / "report.html").read_text()
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["model"]["parameters"] > 1000 and settings["model"]["revision"] == "v1"
    assert settings["machine"] == "cpu, fp32" and settings["versions"]["trl"]


# ---- in a browser

# Clicks on a sample and stores measurements in an attribute of the page, which the browser then prints.
PROBE = """<script>
const boxes=[...document.querySelectorAll('svg')].map(s=>s.getBoundingClientRect());
document.querySelectorAll('.sample')[1].click();
const dialog=document.getElementById('large'),image=dialog.querySelector('img').getBoundingClientRect();
document.body.dataset.found=JSON.stringify({open:dialog.open,image:image.width,
smallest:Math.min(...boxes.map(b=>Math.min(b.width,b.height))),
wide:document.documentElement.scrollWidth-document.documentElement.clientWidth,
broken:[...document.images].filter(i=>i.complete&&!i.naturalWidth).length});
</script>"""


def found_in(page, tmp_path, width, height=4400):
    """What the scripts of a page stored in an attribute; no error may be on the console."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}",
             "--hide-scrollbars", "--virtual-time-budget=2000", "--enable-logging=stderr", "--v=0"]  # fmt: skip
    command = [BROWSER, *flags, f"--window-size={width},{height}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0 and "CONSOLE" not in done.stderr, done.stderr
    return json.loads(re.search(r'data-found="([^"]*)"', done.stdout)[1].replace("&quot;", '"'))


@needs_browser
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_plots_and_opens_pictures(tmp_path, width):
    page = write_report(write_run(tmp_path / "run", evaluations=before_and_after(PngTask())), PngTask())
    page.write_text(page.read_text().replace("</body>", f"{PROBE}</body>"))
    found = found_in(page, tmp_path, width)
    assert found["open"] and found["image"] > 250 and found["smallest"] > 100
    assert found["wide"] <= 0, "the page scrolls sideways"
    assert found["broken"] == 0


# A reader scrolls, opens the settings and leaves; what the page then stored is put into an attribute.
LEAVE = """<script>
const time=[...document.querySelectorAll('h2')].find(h=>h.textContent==='Time');
document.querySelector('details').open=true;scrollTo(0,scrollY+time.getBoundingClientRect().top-137);
dispatchEvent(new Event('pagehide'));document.body.dataset.found=sessionStorage.getItem(location.pathname)
</script>"""
RETURN = """<script>
document.body.dataset.found=JSON.stringify({open:document.querySelector('details').open,
top:[...document.querySelectorAll('h2')].find(h=>h.textContent==='Time').getBoundingClientRect().top})
</script>"""


@needs_browser
def test_a_page_that_reloads_keeps_the_place_of_the_reader(tmp_path):
    folder = write_run(tmp_path / "run", evaluations=before_and_after(PngTask()), finished=False)
    page = write_report(folder, PngTask(), running_to=50)
    text = page.read_text()

    def found(before, after):
        probed = text.replace("<script>", f"{before}<script>", 1).replace("</body>", f"{after}</body>")
        page.write_text(probed)
        return found_in(page, tmp_path, 900, 600)

    stored = found("", LEAVE)
    assert stored == {"head": "Time", "top": pytest.approx(137, abs=1), "open": [0]}
    grown = f"<script>sessionStorage.setItem(location.pathname,'{json.dumps(stored)}')</script>"
    text = text.replace("<main>", "<main><div style='height:777px'></div>")
    assert found(grown, RETURN) == {"open": True, "top": pytest.approx(137, abs=1)}
