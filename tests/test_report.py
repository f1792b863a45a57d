import hashlib
import json
from pathlib import Path

import pytest

from browser import browser, console, opened, requests, until
from evenstep import cli, report
from evenstep.errors import ConfigError, MachineError
from runs import make_run

UPLOT = {  # dist/uPlot.iife.min.js and dist/uPlot.min.css of the npm package uplot 1.6.32
    "uplot.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uplot.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
}


def test_collect_puts_all_starts_on_one_clock(tmp_path):
    run = report.collect(make_run(tmp_path / "a"))
    assert [(s["step"], s["restart"], s["resumed"], s["t"]) for s in run["starts"]] == [
        (0, 0, False, 0.0),
        (17, 1, False, 4.0),  # 2.3 s were lost: the restart was 4 s after the start by the clock
    ]
    assert run["train"]["step"] == list(range(1, 41))
    assert run["train"]["t"][16] == 1.7
    assert run["train"]["t"][17] == pytest.approx(4.1)
    assert run["eval"]["accuracy"] == [0.45, 0.9]
    assert run["times"]["data_s"] == [0.1, 0.2]
    assert run["finished"]
    assert run["numerics"] == {"torch": "2.14.1"}


def test_no_time_passes_between_a_run_and_its_resume(tmp_path):
    starts = [{"kind": "start", "step": 0, "time": 0.0, "restart": 0, "wall_s": 0.0}]
    starts.append({"kind": "start", "step": 5, "time": 90_000.0, "restart": 0, "wall_s": 0.0})
    lines = [starts[0], {"kind": "train", "step": 5, "wall_s": 2.0}, starts[1]]
    lines.append({"kind": "train", "step": 6, "wall_s": 0.5})
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    run = report.collect(tmp_path)
    assert run["train"]["t"] == [2.0, 2.5]
    assert [start["resumed"] for start in run["starts"]] == [False, True]


def test_collect_takes_what_there_is(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": null}\n{"kind": "tr')
    run = report.collect(tmp_path)
    assert run["train"]["loss"] == [None]
    assert not run["finished"]
    assert run["evaluation"] is run["times"] is None
    assert run["config"] == []


def test_long_curves_are_means_of_neighbours(tmp_path):
    lines = [{"kind": "train", "step": s, "loss": float(s % 2), "wall_s": s} for s in range(1, 6001)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    train = report.collect(tmp_path)["train"]
    assert len(train["step"]) == 1500
    assert train["step"][-1] == 6000
    assert set(train["loss"]) == {0.5}


def test_every_option_has_its_value_and_its_source(tmp_path):
    options = {
        key: (value, source) for key, value, source, _ in report.collect(make_run(tmp_path / "a"))["config"]
    }
    assert options["data"] == ("digits", "flag")
    assert options["lr"] == (0.05, "file run.toml")
    assert options["epochs"] == (10, "default")
    assert "run_dir" not in options


def test_a_directory_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has neither config.toml nor metrics.jsonl, so it is not a run"):
        report.collect(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere is not a directory"):
        report.collect(tmp_path / "nowhere")


def test_a_report_that_cannot_be_written_is_told_once_and_stops_nothing(tmp_path):
    run = make_run(tmp_path / "a")
    (run / "report.html").mkdir()
    with pytest.raises(
        MachineError, match=r"cannot write .*report.html: Is a directory. The numbers are safe"
    ):
        report.write(run)
    refresher = report.Refresher(run)
    refresher.refresh()
    assert "cannot write" in str(refresher.error)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_report_is_not_written_again_at_once(tmp_path):
    run = make_run(tmp_path / "a")
    refresher = report.Refresher(run)
    refresher.refresh()
    (run / "report.html").unlink()
    refresher.refresh()
    assert not (run / "report.html").exists()
    refresher.refresh(at_last=True)
    assert (run / "report.html").exists()


def test_the_library_in_the_page_is_the_published_one():
    page = Path(report.__file__).parent / "page"
    digests = {name: hashlib.sha256((page / name).read_bytes()).hexdigest() for name in UPLOT}
    assert digests == UPLOT
    assert "v1.6.32" in (page / "uplot.js").read_text()[:60]
    assert "The MIT License" in (page / "uplot-LICENSE.txt").read_text()


def test_text_of_the_data_cannot_end_the_script(tmp_path):
    text = report.render([{"name": "</script><script>alert(1)</script>"}])
    assert text.count("</script>") == report.render([]).count("</script>")
    assert "<title>evenstep: &lt;/script>" in text


def test_the_command_writes_one_report_or_a_comparison(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert cli.main(["report", "a"]) == 0
    assert cli.main(["report", "a", "b"]) == 0
    assert cli.main(["report", "a", "--output", "other.html"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a/report.html", "report.html", "other.html"]
    assert all((tmp_path / name).is_file() for name in ("a/report.html", "report.html", "other.html"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "evenstep report needs the directory of a run, and got none"),
        (["a", "--outptu", "x"], "unknown flag --outptu. Did you mean '--output'?"),
        (["nowhere"], "nowhere is not a directory"),
    ],
)
def test_wrong_words(words, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(dark, width, tmp_path):
    run = make_run(tmp_path / "a")
    report.write(run)
    with browser(dark=dark, width=width) as page:
        text = opened(page, run / "report.html")
        for expected in ("90.00 %", "finished", "restart 1", "rank 1", "file run.toml", "2.14.1", "ab" * 32):
            assert expected in text
        assert "<b>fox</b> taken for cat" in text
        assert page.execute_script("return document.querySelectorAll('.uplot canvas').length") == 4
        images = "return [...document.images].map(image => [image.naturalWidth, image.src.slice(0, 5)])"
        assert page.execute_script(images) == [[16, "data:"]] * 4
        back = page.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, back[4:-1].split(","))) < 300) == dark
        assert page.execute_script("return document.documentElement.scrollWidth <= innerWidth")
        columns = "return new Set([...document.querySelectorAll('#charts > *')].map(e => e.offsetLeft)).size"
        assert page.execute_script(columns) == (2 if width == 1280 else 1)
        page.execute_script("document.querySelector('input[value=t]').click()")
        assert until(page, "return document.querySelector('.u-legend').innerText.includes('time')")
        assert console(page) == []
        assert requests(page) == [(run / "report.html").as_uri()]


def test_curves_follow_the_theme_and_the_width(tmp_path):
    run = make_run(tmp_path / "a")
    report.write(run)
    with browser() as page:
        opened(page, run / "report.html")
        picture = "return document.querySelector('canvas').toDataURL()"
        light = page.execute_script(picture)
        dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
        assert until(page, f"return document.querySelector('canvas').toDataURL() !== {json.dumps(light)}")
        narrow = {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", narrow)
        assert until(page, "return document.querySelector('.uplot').offsetWidth < 420")
        assert console(page) == []


def test_the_comparison_in_a_browser(tmp_path):
    runs = [make_run(tmp_path / "slow", lr=0.01, accuracy=0.6), make_run(tmp_path / "fast", lr=0.2)]
    path = report.write_page(runs, tmp_path / "report.html")
    with browser() as page:
        text = opened(page, path)
        assert "2 runs side by side" in text
        differences = page.execute_script(
            "return [...document.querySelectorAll('[data-part=differences] tr')].map(row => row.innerText)"
        )
        assert [row.split() for row in differences] == [["slow", "fast"], ["lr", "0.01", "0.2"]]
        assert "90.00 %" in page.execute_script("return document.querySelector('td.best').innerText")
        assert "fast test" in page.execute_script("return document.querySelector('.u-legend').innerText")
        assert console(page) == []
        assert requests(page) == [path.as_uri()]


def test_metrics_of_the_users_own_in_a_browser(tmp_path):
    runs = [
        make_run(tmp_path / "with", own={"psnr": 31.25}),
        make_run(tmp_path / "without"),
        make_run(tmp_path / "goes-on", own={"psnr": 28.5}, finished=False),
    ]
    titles = "return [...document.querySelectorAll('#charts h2')].map(e => e.innerText)"
    with browser() as page:
        for run, value in ((runs[0], "31.25"), (runs[2], "28.5")):
            assert f"{value}\ntest psnr" in opened(page, report.write(run))
            assert page.execute_script(titles)[-1] == "psnr (test)"
        opened(page, report.write_page(runs, tmp_path / "report.html"))
        rows = page.execute_script("return [...document.querySelectorAll('tr')].map(row => row.innerText)")
        column = rows[0].split("\t").index("test psnr")
        assert [row.split("\t")[column] for row in rows[1:4]] == ["31.25", "\N{EN DASH}", "28.5"]
        assert console(page) == []


def test_the_page_of_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "config.toml").write_text("")
    report.write(tmp_path)
    with browser() as page:
        assert "There is no step in metrics.jsonl yet" in opened(page, tmp_path / "report.html")
        assert console(page) == []
