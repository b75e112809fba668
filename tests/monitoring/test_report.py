"""The page of known runs: its sections, hostile text, and errors that name file and line."""

import json
from html.parser import HTMLParser

import pytest

from stable_opd_mcore.monitoring.figures import FIGURES
from stable_opd_mcore.monitoring.report import ReportRun, write_report
from tests.monitoring.make_run import HOSTILE, make_run


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


def data_of(page: Page) -> list:
    return json.loads(page.scripts[1])


def test_one_run(tmp_path):
    page = page_of(write_report([make_run(tmp_path / "a-run")], tmp_path / "out" / "report.html"))
    panels = sum(len(figure.panels) for figure in FIGURES) - 1  # kl/reference has no values
    assert page.count("div", **{"class": "plot"}) == panels
    assert [len(figure) for figure in data_of(page)[0]["figures"]] == [6, 3, 4, 6, 3, 5, 6, 6]
    assert page.count("button") == len(FIGURES)
    assert "a-run" in page.text
    assert "Settings that differ" not in page.text
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["report.html"]


def test_the_page_refers_to_nothing_outside_itself(tmp_path):
    page = page_of(write_report([make_run(tmp_path / "a-run")], tmp_path / "report.html"))
    links = [a[key] for _, a in page.elements for key in ("src", "href") if key in a]
    assert links == ["data:,"]
    (policy,) = [a["content"] for t, a in page.elements if a.get("http-equiv")]
    assert policy.startswith("default-src 'none'")


def test_a_label_has_one_colour_in_all_sections_and_seeds(tmp_path):
    runs = [
        ReportRun(make_run(tmp_path / f"{act}-{arm}-{seed}", 2), arm, act)
        for act, arms in {"collapse": ["opd", "stable_opd"], "stop": ["opd", "fixed"]}.items()
        for arm in arms
        for seed in range(2)
    ]
    summary = [{"act": "collapse", "arm": "opd", "seed": 0, "final_accuracy": 0.25}]
    captions = {"stop": "Other stops."}
    page = page_of(
        write_report(runs, tmp_path / "r.html", title="T", summary=summary, captions=captions)
    )
    first, second = data_of(page)
    assert [label for label, _ in first["styles"]] == ["opd", "stable_opd"]
    assert [label for label, _ in second["styles"]] == ["opd", "fixed"]
    assert first["styles"][0] == second["styles"][0]
    curves = first["figures"][0][0]["curves"]
    assert [curve["label"] for curve in curves] == ["opd", "opd", "stable_opd", "stable_opd"]
    assert page.count("button") == 2 * 2 * len(FIGURES)
    assert {"collapse", "stop", "Summary", "final accuracy", "0.250"} <= set(page.text)
    assert "Other stops." in page.text


def test_equal_directory_names_get_different_labels(tmp_path):
    runs = [make_run(tmp_path / parent / "run", 2) for parent in ("x", "y")]
    (section,) = data_of(page_of(write_report(runs, tmp_path / "r.html")))
    assert [label for label, _ in section["styles"]] == ["x/run", "y/run"]


def test_hostile_text_stays_text(tmp_path):
    run = make_run(tmp_path / "run", 2, text=HOSTILE)
    page = page_of(
        write_report([ReportRun(run, HOSTILE, HOSTILE)], tmp_path / "r.html", title=HOSTILE)
    )
    assert page.count("script") == 3
    assert page.count("img") == 0
    shown = [text for text in page.text if "fail()" in text]
    assert len(shown) > 5
    assert all("{{ 7 * 7 }} ␀�" in text for text in shown)
    curve = data_of(page)[0]["figures"][0][0]["curves"][0]
    assert "<" not in page.scripts[1]
    assert "<" not in curve["name"]
    assert "&lt;img" in curve["name"]


def test_no_runs_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="give at least one run"):
        write_report([], tmp_path / "r.html")


def test_broken_runs_are_named_and_nothing_is_written(tmp_path):
    run = make_run(tmp_path / "run", 3)
    missing = r"nothing/metrics\.jsonl: no such file"
    with pytest.raises(ValueError, match=missing):
        write_report([run, tmp_path / "nothing"], tmp_path / "r.html")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ValueError, match="loop"):
        write_report([tmp_path / "loop"], tmp_path / "r.html")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss/total": NaNN}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 5: not JSON"):
        write_report([run], tmp_path / "r.html")
    other = make_run(tmp_path / "other", 3)
    (other / "config.resolved.yaml").write_text("a: [1")
    with pytest.raises(ValueError, match=r"config\.resolved\.yaml: not readable as YAML"):
        write_report([other], tmp_path / "r.html")
    (other / "config.resolved.yaml").unlink()
    (other / "rollouts" / "step_000001.jsonl").write_text("{}\n")
    with pytest.raises(
        ValueError, match=r"step_000001\.jsonl, line 1: column prompt_id is missing"
    ):
        write_report([other], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
