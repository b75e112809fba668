"""The page of known runs: its figures, hostile text, and errors that name file and line."""

import base64
import gzip
import json
from html.parser import HTMLParser

import pytest

from stable_opd_mcore.commands.report.chosen_runs import ReportRun
from stable_opd_mcore.commands.report.figures import FIGURES
from stable_opd_mcore.commands.report.report import write_report
from tests.commands.report.make_run import HOSTILE, make_run


class Page(HTMLParser):
    """Elements, headings and visible text of a page; the inside of scripts apart."""

    def __init__(self, html: str):
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.text: list[str] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.text.append(data)

    def count(self, tag, **attributes):
        return sum(t == tag and attributes.items() <= a.items() for t, a in self.elements)


def page_of(path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def data_of(page: Page) -> dict:
    return json.loads(page.scripts[0])


def rollouts_of(page: Page) -> dict:
    return json.loads(gzip.decompress(base64.b64decode(page.scripts[1])))


def test_one_run(tmp_path):
    run = make_run(tmp_path / "a-run")
    event = {"event": "guard", "after_step": 2, "action": "raise beta", "evidence": {"slope": 0.5}}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    (run / "evaluation" / "step_000030").mkdir(parents=True)
    values = '{"benchmarks": {"aime24": {"accuracy": 0.25}}}'
    (run / "evaluation" / "step_000030" / "results.json").write_text(values)
    page = page_of(write_report([run], tmp_path / "out" / "report.html"))
    panels = sum(len(figure.panels) for figure in FIGURES) - 1  # kl/reference has no values
    assert page.count("div", **{"class": "plot"}) == panels
    assert [len(figure) for figure in data_of(page)["figures"]] == [6, 10, 3, 4, 8, 3, 5, 6, 8]
    assert page.count("div", **{"class": "legend"}) == 0
    assert page.elements.count(("h1", {})) == 1
    assert {"a-run", "Held-out accuracy", "aime24"} <= set(page.text)
    assert page.count("details", id="differences") == 0
    assert data_of(page)["events"] == [
        {"run": 0, "step": 2, "title": "guard: raise beta", "kind": "other"}
    ]
    assert {"after step 2", "guard: raise beta", "slope: 0.5"} <= set(page.text)
    assert [r["step"] for r in rollouts_of(page)["rollouts"]] == [1, 1, 30, 30]
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]
    links = [a[key] for _, a in page.elements for key in ("src", "href") if key in a]
    targets = {a["id"] for _, a in page.elements if "id" in a}
    assert {link for link in links if link[1:] not in targets} == {"data:,"}  # nothing outside
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")


def test_unreadable_runs_are_named_and_a_title_names_some(tmp_path, caplog):
    with pytest.raises(ValueError, match="give at least one run"):
        write_report([], tmp_path / "r.html")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("nothing", "loop"):
        with pytest.raises(ValueError, match=rf"{name}/metrics\.jsonl: no such file"):
            write_report([tmp_path / name], tmp_path / "r.html")
    runs = [make_run(tmp_path / name, 2) for name in ("w", "x", "y", "z")]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").touch()
    (tmp_path / "notes.html").write_text("<!doctype html><p>my notes")
    for kept in ("notes.html", "empty", "w/metrics.jsonl"):
        with pytest.raises(ValueError, match="is no report, so it is kept"):
            write_report(runs, tmp_path / kept)
    assert (tmp_path / "notes.html").read_text().endswith("my notes")
    for bad in ("empty", "nothing"):  # the second replaces the first's report
        page = page_of(write_report([tmp_path / bad, *runs], tmp_path / "r.html"))
        (problem,) = [text for text in page.text if "metrics.jsonl" in text]
        assert bad in problem
        assert problem in caplog.text
    assert page.text.count("w, x, y and 1 more") == 3  # title, bar, heading
    assert "4 runs of on-policy distillation" in page.text


def test_runs_of_one_label_share_a_colour_and_a_mean(tmp_path):
    runs = [
        ReportRun(make_run(tmp_path / f"{arm}-{seed}", 2), arm)
        for arm in ("opd", "stable_opd")
        for seed in range(2)
    ]
    page = page_of(write_report(runs, tmp_path / "r.html", title="T", caption="Other stops."))
    content = data_of(page)
    assert [label["name"] for label in content["labels"]] == ["opd", "stable_opd"]
    assert len({label["colour"] for label in content["labels"]}) == 2
    assert content["runs"] == [0, 0, 1, 1]
    curves = content["figures"][0][0]["curves"]
    assert [(curve["run"], "mean" in curve) for curve in curves] == [
        *((run, False) for run in range(4)),
        (0, True),
        (2, True),
    ]
    assert "Means over seeds" in page.text
    assert page.count("button", type="button", **{"aria-pressed": "true", "data-label": "0"}) == (
        len(FIGURES)
    )
    assert "Other stops." in page.text


def test_hostile_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run", 2, text=HOSTILE)
    page = page_of(
        write_report([ReportRun(run, HOSTILE)], tmp_path / "r.html", title=HOSTILE, caption=HOSTILE)
    )
    assert page.count("script") == 5
    assert page.count("img") == 0
    shown = [text for text in page.text if "fail()" in text]
    assert len(shown) > 3
    assert all("{{ 7 * 7 }} ␀�" in text for text in shown)
    assert "<" not in page.scripts[0]
    assert "fail()" in data_of(page)["labels"][0]["name"]
    assert "\x00" not in rollouts_of(page)["rollouts"][0]["detail"]["text"]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("metrics.jsonl", '{"step": 4, "a": NaNN}\n{"step": 5}\n', "line 1: not JSON"),
        ("config.resolved.yaml", "a: [1", "not readable as YAML"),
        ("rollouts/step_000001.jsonl", "{}\n", "line 1: column prompt_id is missing"),
    ],
)
def test_broken_files_are_named_and_nothing_is_written(tmp_path, file, text, message):
    run = make_run(tmp_path / "run", 3)
    (run / file).write_text(text)
    with pytest.raises(ValueError, match=rf"run/{file}.*{message}") as found:
        write_report([run], tmp_path / "r.html")
    assert len(str(found.value).splitlines()) == 1
    assert not (tmp_path / "r.html").exists()
