"""The report in a browser: all panels are drawn, the console is empty, no text runs as HTML."""

import re
import shutil
import subprocess

import pytest

from stable_opd_mcore.monitoring.figures import FIGURES
from stable_opd_mcore.monitoring.report import ReportRun, write_report
from tests.monitoring.make_run import HOSTILE, make_run

BROWSER = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
    "--dump-dom",
]


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_browser_draws_every_panel_and_runs_no_text_as_html(tmp_path):
    runs = [
        ReportRun(make_run(tmp_path / "opd", 40, collapse_at=20, text=HOSTILE), "opd", "one"),
        ReportRun(make_run(tmp_path / "held", 40, beta=0.5), HOSTILE, "one"),
        ReportRun(make_run(tmp_path / "other", 4), "opd", "two"),
    ]
    report = write_report(runs, tmp_path / "report.html", title="Browser")
    panels = report.read_text().count('class="plot"')
    result = subprocess.run(
        [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", report.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    page = re.sub(r"<script\b.*?</script>", "", result.stdout, flags=re.DOTALL)
    keys = [panel.key for figure in FIGURES for panel in figure.panels]
    keys.remove("kl/reference")  # no run has values of it
    evaluations = sum(key.startswith("eval/") for key in keys)
    assert panels == 2 * len(keys)
    assert page.count('class="plot-container plotly"') == panels
    # In section one each of two runs has a curve of means and one of single steps; an evaluation
    # has points only.
    assert page.count('class="trace scatter') == 2 * (2 * len(keys) - evaluations) + len(keys)
    assert "<img src=" not in page
    assert "&lt;img src=x onerror=fail()&gt;" in page
    assert [line for line in result.stderr.splitlines() if "CONSOLE" in line] == []
