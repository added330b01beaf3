"""`rollplex report`: one page of a run, read in a real Chromium; what is missing is named; nothing in it is believed."""

from __future__ import annotations

import builtins
import html
import json
import os
import re
import shutil

import numpy as np
import pytest
from fake_engine import FakeEngine, Scripted
from lightning.pytorch.loggers import CSVLogger
from PIL import Image
from runs import run

from rollplex.callbacks import (
    EnvironmentLogger,
    GroupStreaming,
    MemoryReport,
    PrefixOverlap,
    RolloutLogger,
    TimelineLogger,
)
from rollplex.cli import main
from rollplex.reports.charts import CurveSpec, line_chart
from rollplex.reports.page import shown_of
from rollplex.reports.run_files import HOW, read_run, spread
from rollplex.reports.samples import printable, sample_views, thumbnail
from rollplex.reports.scalars import Series, read_scalars
from rollplex.reports.tiles import tiles

pytest.importorskip("matplotlib")

HOSTILE = "<script>document.title = 'taken'</script><img src=x onerror=alert(1)> \x07 & \u202egnp.exe"
CONFIG = "model:\n  class_path: rollplex.GRPOModule\n  init_args:\n    model: </pre><script>1</script>\ntrainer:\n  callbacks:\n  - class_path: rollplex.callbacks.PrefixOverlap\n"


@pytest.fixture(scope="module")
def folder(parity_folder, tmp_path_factory):
    """A run of 3 rollout batches that recorded everything; its responses are HTML."""
    root = tmp_path_factory.mktemp("report") / "the run"
    engine = FakeEngine(lambda r: Scripted([65 + r.index, 66 + r.group], text=f"{HOSTILE} {r.key}"), decode_delay=0.02)
    callbacks = [PrefixOverlap(), GroupStreaming(), TimelineLogger(1), MemoryReport(print_table=False)]
    callbacks += [RolloutLogger(every_n_steps=1), EnvironmentLogger()]
    run(
        parity_folder, root, steps=3, engine=engine, callbacks=callbacks, beta=0.1,
        trainer={"logger": CSVLogger(root), "log_every_n_steps": 1},
    )  # fmt: skip
    next(root.rglob("metrics.csv")).with_name("config.yaml").write_text(CONFIG)
    return root


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    """Its report, beside another run, a benchmark's file and a verification's."""
    at = tmp_path_factory.mktemp("page")
    other = shutil.copytree(folder, at / "other <b>run</b>")
    (at / "bench.json").write_text(json.dumps({
        "machine": {"cpu": "a <i>cpu</i>"}, "rounds": [1, 2],
        "summary": {"serial": {"step": 2.0, "rollout": 1.0, "train": 0.9, "step_min": 1.9}, "trl": {"step": 5.0}},
    }))  # fmt: skip
    same = {"identical": True, "max_abs": 0.0}
    (at / "verify.json").write_text(json.dumps({
        "passed": True,
        "case": {"schedules": {"overlap": {"verdict": "identical", "differences": {"weights": same}}}},
    }))  # fmt: skip
    target = at / "report.html"
    main(
        [
            "report",
            str(folder),
            "--output",
            str(target),
            "--compare",
            *map(str, (other, at / "bench.json", at / "verify.json")),
        ]
    )
    return target


# ---- what the page says ----


def test_the_page_shows_what_the_run_recorded(folder, page):
    text = page.read_text()
    for key in ("learning", "safety", "speed", "step", "memory-section", "samples", "comparison", "setup"):
        assert f'<h2 id="{key}">' in text, key
    assert 'id="missing"' not in text
    scalars = read_scalars(folder)
    reward = scalars["reward"]
    assert reward.steps == (1, 2, 3) and f"<td>{reward.values[-1]:.4g}</td>" in text
    assert text.count("data:image/") >= 6  # three rollout batches, pictures of several prompts each
    assert "PrefixOverlap" in text and "torch" in text and "Benchmark: seconds of a step" in text
    assert "from the serial schedule" in text and "verdict" in text


def test_every_chart_has_words_and_a_table(page):
    text = page.read_text()
    figures = re.findall(r"<figure.*?</figure>", text, re.S)
    assert len(figures) >= 10
    for figure in figures:
        label = re.search(r'<svg role="img" aria-label="([^"]+)"', figure)
        assert label and len(label.group(1)) > 20 and "<table>" in figure and "<td>" in figure
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids)), "two elements have one id"
    assert all(re.search(r'alt="[^"]+"', image) for image in re.findall(r"<img [^>]*>", text))


def test_what_the_model_said_is_text_on_the_page(page):
    text = page.read_text()
    assert (
        "<script" not in text and "onerror=alert(1)>" not in text and "<b>run</b>" not in text and "<i>cpu" not in text
    )
    assert html.escape("<script>document.title = 'taken'</script>", quote=True).replace("&#x27;", "&#39;") in text
    assert "\\x07" in text and "\x07" not in text


def test_nothing_is_loaded(page):
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:|#)', text) and "@import" not in text and "url(http" not in text


# ---- what is not there ----


def test_missing_parts_are_named_with_what_writes_them(folder, tmp_path, capsys):
    (tmp_path / "rollouts").mkdir()
    shutil.copy(folder / "rollouts" / "step_000001.jsonl", tmp_path / "rollouts")  # without its pictures
    main(["report", str(tmp_path)])
    text, out = (tmp_path / "report.html").read_text(), capsys.readouterr().out
    for part in set(HOW) - {"samples"}:
        assert f"<dt>{part}</dt>" in text and HOW[part][:30] in out
    for name in ("TimelineLogger", "MemoryReport", "CSVLogger", "EnvironmentLogger"):
        assert name in text
    assert "could not be read" in text


@pytest.mark.parametrize("what", ["absent", "empty", "file", "compare", "samples"])
def test_what_is_no_run_is_an_error_of_one_line(folder, tmp_path, what):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("{}")
    arguments = {
        "compare": [str(folder), "--compare", str(tmp_path / "file")],
        "samples": [str(folder), "--samples", "-1"],
    }
    with pytest.raises(SystemExit, match=r"error: .*(is no folder|is no run|neither a run|must be at least)") as stop:
        main(["report", *arguments.get(what, [str(tmp_path / what)])])
    assert "\n" not in str(stop.value)


def test_damaged_parts_are_told_and_the_rest_is_shown(folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "memory.json").write_text("{ half")
    for path in (broken / "timeline").iterdir():
        path.write_text('{"traceEvents": [{"ph": "X"}]}')
    lines = (broken / "rollouts" / "step_000003.jsonl").read_text()
    (broken / "rollouts" / "step_000003.jsonl").write_text(lines[: len(lines) - 40])
    found = read_run(broken)
    assert {m.what for m in found.missing} == {"memory", "timeline"} and all("damaged" in m.why for m in found.missing)
    assert found.samples[-1].step == 3 and len(found.samples[-1].records) == lines.count("\n") - 1


@pytest.mark.parametrize(
    "content", ["", "{ha", "[" * 100_000, '{"responses": 1}'], ids=["empty", "half", "deep", "other"]
)
@pytest.mark.parametrize("file", ["rollouts/step_000001.jsonl", "metrics.csv"])
def test_a_file_with_nothing_whole_is_damaged_not_absent(tmp_path, file, content):
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    part = "curves" if file == "metrics.csv" else "samples"
    (why,) = [m.why for m in read_run(tmp_path).missing if m.what == part]
    assert why.startswith("empty or damaged") and path.name in why


def test_a_line_without_end_takes_no_other_with_it(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_000003.jsonl").write_text("[" * 100_000 + '\n{"responses": []}\n')
    (tmp_path / "memory.json").write_text("[" * 100_000)
    found = read_run(tmp_path)
    assert [m.what for m in found.missing if m.why.startswith("damaged")] == ["memory"]
    assert [(s.step, len(s.records)) for s in found.samples] == [(3, 1)]


@pytest.mark.filterwarnings("error:Glyph")
def test_a_sample_of_many_pictures_and_responses_is_shown_in_part(tmp_path):
    (tmp_path / "rollouts").mkdir()
    texts = [{"text": f"a\u2028b {i}", "reward": 10**400} for i in range(300)]
    record = {"id": "x", "prompt": "p", "images": ["no.png"] * 40, "responses": texts}
    (tmp_path / "rollouts" / "step_000003.jsonl").write_text(json.dumps(record, ensure_ascii=False) + "\n")
    (tmp_path / "config.yaml").write_text("class_path: x\n" + "a: 1\n" * 6_000)
    (tmp_path / "metrics.csv").write_text(f"step,{','.join(f'reward/正{i}' for i in range(40))}\n1{',2' * 40}\n")
    main(["report", str(tmp_path)])
    text = (tmp_path / "report.html").read_text()
    assert "Not shown: 24 more pictures, 284 more responses." in text and "16 pictures could not be read" in text
    assert "4,001 lines more" in text and "26 more are not drawn" in text and len(text) < 150_000


def test_a_sample_shows_the_right_answer_or_what_its_row_holds(tmp_path):
    (tmp_path / "rollouts").mkdir()
    known = [{"answer": ["a", 2]}, {"columns": {"number": 3}}, {}]  # the last as an earlier version wrote it
    lines = [json.dumps({"id": "x", "responses": [{"reward": 0.123456}], **more}) for more in known]
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text("\n".join(lines) + "\n")
    ((_, views),) = sample_views(read_run(tmp_path).samples, 9, 100)
    assert [view.facts for view in views] == [(("right answer", "['a', 2]"),), (("number", "3"),), ()]
    assert views[0].responses[0].reward == "0.123"
    main(["report", str(tmp_path)])
    assert 'right answer: <span class="said"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_a_package_the_extra_is_named(folder, tmp_path, monkeypatch, package):
    real = builtins.__import__

    def refuse(name, *rest, **more):
        if name.split(".")[0] == package:
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SystemExit, match=rf"needs {package}, which is not installed: pip install 'rollplex\[report\]'"):
        main(["report", str(folder), "--output", str(tmp_path / "x.html")])
    assert not (tmp_path / "x.html").exists()


# ---- reading ----


def test_a_resumed_runs_curves_are_joined_and_an_earlier_runs_left_out(tmp_path):
    for version, (begin, end, value) in enumerate([(0, 9, 1.0), (0, 6, 2.0), (4, 8, 3.0)]):
        path = tmp_path / f"version_{version}" / "metrics.csv"
        path.parent.mkdir()
        path.write_text("step,epoch,reward\n" + "".join(f"{s},0,{value}\n" for s in range(begin, end)))
        os.utime(path, (version, version))
    reward = read_scalars(tmp_path)["reward"]
    assert reward.steps == tuple(range(1, 9)) and reward.values == (2.0,) * 4 + (3.0,) * 4


def curves(folder, **columns):
    """A metrics.csv of as many rollout batches as its columns have values."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    lines = [f"{i},{row}" for i, row in enumerate(rows)]
    names = ",".join(name.replace("__", "/") for name in columns)
    (folder / "metrics.csv").write_text("\n".join([f"step,{names}", *lines]) + "\n")


def test_the_curves_are_of_the_newest_run_that_trained(tmp_path):
    curves(tmp_path / "version_0", reward=[1, 2, 3])
    (tmp_path / "version_1").mkdir()
    (tmp_path / "version_1" / "metrics.csv").write_text("step,val/accuracy\n0,1.0\n")
    os.utime(tmp_path / "version_0" / "metrics.csv", (1, 1))
    assert read_scalars(tmp_path)["reward"].values == (1, 2, 3)


def told(run) -> dict[str, tuple[str, str]]:
    return {label: (value, remark) for label, value, remark in tiles(run)}


def test_hidden_work_is_a_share_of_the_seconds_and_says_when_it_stopped_to_pay(tmp_path):
    share, slow = [1, 1, 0, 0], [0, 0, 2, 2]
    alpha = [0.1, 0.2, 0.44, 0.44]
    columns = dict(overlap_efficiency=share, units_refused__slow=slow, decode_slowdown=alpha, time__prefix=[1, 1, 1, 5])
    curves(tmp_path, **columns)
    value, remark = told(read_run(tmp_path))["Prefix work hidden"]
    assert value == "25 %" and remark == (
        "of its seconds in the whole run; none after batch 2, where it was measured not to pay: a decode step takes "
        "44 % longer beside it"
    )
    curves(tmp_path, **columns | {"units_refused__slow": [0, 0, 0, 0]})  # kept out by memory, or to measure
    assert told(read_run(tmp_path))["Prefix work hidden"] == ("25 %", "of its seconds in the whole run")
    del columns["time__prefix"]
    curves(tmp_path, **columns)  # of an earlier version
    assert told(read_run(tmp_path))["Prefix work hidden"][0] == "50 %"


def test_the_head_of_the_page(tmp_path):
    curves(tmp_path, reward=[0.123456], rows_skipped=[9])
    assert told(read_run(tmp_path)) == {
        "Reward": ("0.123", "over 1 rollout batch"),
        "Rows skipped": ("9", "bad rows, left out; the run's output names each"),
    }
    step, accuracy = [1.0, 2.0, 4.0, 9.0], [0.25, 0.5, 0.5, 0.125]
    curves(tmp_path, reward=[0, 1, 2, 3], val__accuracy=accuracy, time__step=step, rows_skipped=[0] * 4)
    found = told(read_run(tmp_path))
    assert found["Validation accuracy"] == ("0.125", "best 0.5 after batch 2") and "Rows skipped" not in found
    assert found["Step"][0] == "3" and found["Reward"] == ("3", "from 0; over 4 rollout batches")


def test_a_folder_of_several_runs_says_which_is_shown(tmp_path):
    curves(tmp_path / "csv" / "version_0", reward=[1, 2])
    assert shown_of(read_run(tmp_path)) == ""
    curves(tmp_path / "csv" / "version_1", reward=[3, 4])
    os.utime(tmp_path / "csv" / "version_0" / "metrics.csv", (1, 1))
    main(["report", str(tmp_path)])
    assert (
        "The folder holds several runs. The curves are of the newest, csv/version_1; not shown: csv/version_0."
        in (tmp_path / "report.html").read_text()
    )


def test_batches_are_whole_numbers_on_the_axis():
    for n in (1, 2, 3, 40):
        series = Series(tuple(range(1, n + 1)), tuple(range(n)))
        svg = line_chart(CurveSpec("x", "T", (), "u", "Note."), {"a": series}).svg
        ticks = re.findall(r'id="x-xtick_\d+">.*?<text[^>]*>([^<]+)</text>', svg, re.S)
        assert ticks and all(tick.isdigit() or tick[1:].isdigit() for tick in ticks), ticks


def test_curves_without_csv_come_from_tensorboard(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for step in range(3):
            writer.add_scalar("reward", step / 2, step)
    assert read_scalars(tmp_path)["reward"] == Series((1.0, 2.0, 3.0), (0.0, 0.5, 1.0))


def test_long_curves_are_thinned_and_any_name_is_drawn():
    series = Series(tuple(map(float, range(10_000))), tuple(float(i % 7) for i in range(10_000)))
    chart = line_chart(CurveSpec("x", "T", (), "u", "Note."), {"$\\frac{": series, "_a & <b>": series})
    assert "mean of 34 rollout batches" in chart.note and len(chart.svg) < 60_000 and len(chart.table.rows) <= 20
    assert "&lt;b&gt;" in chart.svg and "<b>" not in chart.svg


def test_small_helpers(tmp_path):
    assert spread(10, 3) == [0, 4, 9] and spread(2, 3) == [0, 1] and spread(5, 1) == [4] and spread(5, 0) == []
    assert printable("a\x00\ud800\n") == "a\\x00?\n" and printable("x" * 5000).endswith("(1,000 characters more)")
    Image.new("RGB", (1000, 10)).save(tmp_path / "a.png")
    (tmp_path / "in").mkdir()
    assert thumbnail(tmp_path, "a.png", 100).startswith("data:image/png;base64,")
    assert thumbnail(tmp_path / "in", "../a.png", 100) is None and thumbnail(tmp_path, "b.png", 100) is None


# ---- in a browser ----


@pytest.fixture(scope="module")
def browser():
    from browser import Browser, find

    program = find()
    if program is None:
        assert not os.environ.get("CI"), "CI must look at the report in a browser: no Chromium is installed"
        pytest.skip("no Chromium on this machine: install it (Debian: apt-get install chromium)")
    with Browser(program) as started:
        yield started


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (400, False), (1280, True)])
def test_the_page_in_chromium(browser, page, width, dark):
    browser.open(page, width, dark=dark)
    assert browser.complaints == [] and browser.requests == []
    assert browser.evaluate("document.title") == "the run - Rollplex report"
    inner, content = browser.evaluate("[innerWidth, document.documentElement.scrollWidth]")
    assert (inner, content) == (width, width), "the page is wider than the window"
    background = np.array([17, 22, 29] if dark else [246, 247, 249])
    shot = browser.screenshot()
    assert shot.shape[1] == width and (shot[5, 5] == background).all()
    boxes = browser.evaluate(
        "[...document.querySelectorAll('figure.chart svg')].map(f => [f.closest('figure').id, f.getBoundingClientRect()])"
        ".map(([id, b]) => [id, b.x + scrollX, b.y + scrollY, b.width, b.height])"
    )
    assert len(boxes) >= 10
    for name, *box in boxes:
        x, y, w, h = map(int, box)
        picture = shot[y : y + h, x : min(x + w, width - 40)].astype(int)
        card = np.median(picture.reshape(-1, 3), axis=0)
        drawn = (np.abs(picture - card).max(axis=2) > 60).mean()
        assert drawn > 0.005, f"{name} is blank: {drawn:.4f}"
        assert (np.ptp(picture, axis=2) > 60).mean() > 0.0005, f"{name} has no colour"


def test_the_browser_would_tell(browser, tmp_path):
    """The checks above see what they are there for."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<img src='http://127.0.0.1:9/x.png'><div style='width: 3000px; height: 9px'></div><script>nothere()</script>"
    )
    browser.open(bad, 400)
    assert browser.complaints and browser.requests == ["http://127.0.0.1:9/x.png"]
    assert browser.evaluate("document.documentElement.scrollWidth") > 1000
