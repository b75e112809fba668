"""The report in a browser: figures, events, the reader by keyboard, a growing run, hostile text."""

import re
from dataclasses import replace
from threading import Thread

import pytest

from stable_opd_mcore.commands.report.chosen_runs import ReportRun
from stable_opd_mcore.commands.report.figures import FIGURES
from stable_opd_mcore.commands.report.follow import ReportServer
from stable_opd_mcore.commands.report.report import write_report
from stable_opd_mcore.data.rollout_files import read_rollouts, write_rollouts
from stable_opd_mcore.data.token_files import TokenText, write_tokens
from stable_opd_mcore.host.run_directory import RunDirectory
from stable_opd_mcore.monitoring.metric_sinks import JsonlSink
from stable_opd_mcore.records import Prompt, Rollout, Turn
from tests.commands.report.make_run import HOSTILE, make_run
from tests.integration.browser import BROWSER, Browser

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium")

# How many canvases have a pixel in a colour that is neither transparent nor grey, as curves do.
DRAWN = """
[...document.querySelectorAll('.plot canvas')].filter((canvas) => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] > 200 && Math.max(data[i], data[i + 1], data[i + 2]) -
        Math.min(data[i], data[i + 1], data[i + 2]) > 80) return true;
  return false;
}).length
"""
# The places of the plots' left and lower axes inside their panels, each once.
AXES = """
[...new Set([...document.querySelectorAll('.u-over')].map((over) => {
  const inside = over.getBoundingClientRect(), plot = over.closest('.plot').getBoundingClientRect();
  return `${inside.left - plot.left} ${plot.bottom - inside.bottom}`;
}))]
"""
WIDER_THAN_THE_WINDOW = "document.documentElement.scrollWidth > innerWidth"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


def open_report(browser, report, **window):
    browser.console.clear()
    browser.requests.clear()
    browser.open(report.as_uri(), **window)
    browser.wait("document.getElementById('rollouts').dataset.ready === 'yes'")


def store_tokens(directory, step, pieces, **values):
    rollouts = read_rollouts(RunDirectory(directory).rollouts(step))
    first = rollouts[0]
    rollouts[0] = Rollout(
        first.prompt, 0, tuple(range(len(pieces))), (-0.5,) * len(pieces), "stop", step,
        "".join(pieces), 1.0,
    )  # fmt: skip
    write_rollouts(RunDirectory(directory).rollouts(step), rollouts)
    write_tokens(
        RunDirectory(directory).tokens(step),
        [TokenText(first.prompt.prompt_id, 0, tuple(pieces), values, "golden " + HOSTILE)],
    )


def chosen(browser) -> str:
    return browser.run("document.querySelector('#reader-list [aria-selected=true]').textContent")


@pytest.mark.parametrize(("width", "dark"), [(1400, False), (400, True)])
def test_every_panel_is_drawn_without_a_message_or_a_request(browser, tmp_path, width, dark):
    runs = [
        ReportRun(make_run(tmp_path / "opd", 40, collapse_at=20, text=HOSTILE), "opd"),
        ReportRun(make_run(tmp_path / "held", 40, beta=0.5), HOSTILE),
        ReportRun(make_run(tmp_path / "other", 4), "opd"),
    ]
    report = write_report(runs, tmp_path / "report.html", title=HOSTILE)
    open_report(browser, report, width=width, dark=dark)
    panels = sum(len(figure.panels) for figure in FIGURES) - 1  # kl/reference has no values
    assert browser.run("document.querySelectorAll('.plot canvas').length") == panels
    assert browser.run(DRAWN) == panels
    assert len(browser.run(AXES)) == 1
    assert not browser.run(WIDER_THAN_THE_WINDOW)
    light = browser.run("getComputedStyle(document.body).color")
    browser.run("document.getElementById('theme').click()")
    assert browser.run("getComputedStyle(document.body).color") != light
    assert browser.run(DRAWN) == panels
    assert browser.run("document.querySelectorAll('main img, #rollouts img').length") == 0
    assert browser.console == []
    assert browser.requests == [report.as_uri()]


def test_the_table_of_outcomes_fits_a_page(browser, tmp_path):
    names = ("stable_opd_from_the_distilled_student_seed_0", "b" * 30, "c")
    runs = [make_run(tmp_path / name, 1200, collapse_at=600) for name in names]
    open_report(browser, write_report(runs, tmp_path / "report.html"), width=1300)
    table = "document.querySelector('[data-key=outcomes] .scroll')"
    assert browser.run(f"{table}.querySelectorAll('tbody tr').length") == 3
    assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth")
    assert not browser.run(WIDER_THAN_THE_WINDOW)


def test_a_small_learning_rate_has_ticks_and_events_are_told(browser, tmp_path):
    run = make_run(tmp_path / "run", 30)
    path = run / "metrics.jsonl"
    text = path.read_text().replace('"optimizer/lr": ', '"optimizer/lr": 1e-6, "was": ')
    path.write_text(text + '{"event": "guard", "after_step": 30, "action": "roll back"}\n')
    open_report(browser, write_report([run], tmp_path / "report.html"))
    browser.run("document.querySelector('[aria-label^=\"Learning rate\"]').focus()")
    browser.press("ArrowLeft")
    tip = browser.run("document.querySelector('.plot:focus .tip').innerText")
    assert re.sub(r"\s+", " ", tip).startswith("step 30 run 1e-6")
    assert "guard: roll back (after step 30)" in tip
    browser.press("ArrowLeft", times=2)
    assert "28" in browser.run("document.querySelector('.plot:focus .u-value').textContent")
    assert browser.console == []


def test_the_reader_works_by_keyboard(browser, tmp_path):
    run = make_run(tmp_path / "run", 30, collapse_at=10)
    store_tokens(run, 30, ["one ", "two ", "three"], advantage=(0.5, -0.5, 0.0))
    open_report(browser, write_report([run], tmp_path / "report.html"))
    assert browser.run("document.getElementById('reader-step').value") == "30"
    spans = "[...document.querySelectorAll('.tokens span')]"
    assert browser.run(f"{spans}.map((s) => s.textContent)") == ["one ", "two ", "three"]
    blue, orange, none = browser.run(f"{spans}.map((s) => s.style.background)")
    assert blue.startswith("rgba(40, 140, 220")
    assert orange.startswith("rgba(225, 95, 20")
    assert none == ""
    browser.press("c")  # the next colouring
    assert browser.run("document.getElementById('reader-colour').value") == "rollout_logprob"
    browser.run("document.querySelector('.tokens').focus()")
    browser.press("ArrowRight", times=2)
    readout = browser.run("document.querySelector('.readout').textContent")
    assert readout.startswith('"two " token 1')
    assert "advantage -0.5" in readout
    browser.run("document.getElementById('reader-list').focus()")
    browser.press("ArrowDown")
    assert "truncated" in chosen(browser)
    assert "repeats" not in chosen(browser)  # one token
    browser.press("k")
    assert "right" in chosen(browser)
    browser.press("f")  # the filter "truncated"
    browser.wait("document.querySelectorAll('#reader-list li').length === 1")
    browser.press("[")  # an earlier step
    browser.wait("document.getElementById('reader-step').value === '1'")
    browser.press("f", times=4)
    browser.wait("document.querySelectorAll('#reader-list li').length === 2")
    browser.press("/")
    for letter in "w1;w1":
        browser.press(letter)
    browser.wait("document.querySelectorAll('#reader-list li').length === 0")
    browser.press("Escape")
    browser.press("]")
    browser.wait("document.querySelectorAll('#reader-list li').length === 1")
    assert browser.run("document.querySelectorAll('#reader-detail mark').length") > 10
    assert browser.console == []


def test_observed_text_stands_between_the_turns(browser, tmp_path):
    run = make_run(tmp_path / "run", 1)
    store_tokens(run, 1, ["go ", "north", "stop"], advantage=(0.5, -0.5, 0.0))
    path = RunDirectory(run).rollouts(1)
    first, *others = read_rollouts(path)
    again = (*first.prompt.token_ids, *first.token_ids[:2].tolist(), 7)  # a fork of the first turn
    turns = (
        Turn(2, "stop", text="go north"),
        Turn(1, "stop", again, True, text="stop", observed="a wall"),
    )
    agents = replace(first, turns=turns, account={"begun": 1, "forked": 1, "sampled_tokens": 3})
    third = Turn(0, "stop", (8,), True, observed="another")
    both = [agents, replace(first, turns=(*turns, third), sample_index=9)]
    write_rollouts(path, [*both, *others])
    open_report(browser, write_report([run], tmp_path / "report.html"))
    expected = "go north\n… a new context that continues turn 1 …\na wallstop"
    assert browser.run("document.querySelector('.tokens').textContent") == expected
    assert "2 turns" in browser.run("document.querySelector('.facts').textContent")
    tree = "document.querySelector('.contexts > li')"
    nested = "turn 1 4 tokens" + "turn 2 6 tokens, continues turn 1"
    assert browser.run(f"{tree}.textContent") == nested
    assert browser.run(f"{tree}.querySelector(':scope > ul button').textContent") == "turn 2"
    account = browser.run("document.querySelector('#reader-detail p').textContent")
    assert account.startswith("requests: 0 continued, 1 forked, 1 begun, 0 rewritten; 0 of 3 ")
    dimmed = "getComputedStyle(document.querySelectorAll('.observed')[1]).opacity"
    assert float(browser.run(dimmed)) < 1
    browser.press("j")
    browser.wait("!document.querySelector('.tokens')")
    assert browser.run("document.querySelectorAll('.contexts > li').length") == 2
    shown = "document.querySelectorAll('#reader-detail pre')[1]"
    another = "\n… a new context …\nanother"
    assert browser.run(f"{shown}.textContent") == expected + another
    browser.run("scrollTo(0, 0)")
    browser.run("document.querySelectorAll('.contexts button')[2].click()")
    browser.wait("scrollY > 0")
    seen = f"{shown}.querySelectorAll('.observed')[1].textContent"
    assert browser.run(seen).endswith("a wall")
    assert browser.console == []


def test_hostile_text_is_shown_as_text(browser, tmp_path):
    run = make_run(tmp_path / "run", 1)
    store_tokens(run, 1, [HOSTILE, "\u202eright\u200f", "\ud83d"], teacher_logprob=(-1, -2, None))
    long = Rollout(
        Prompt(HOSTILE, HOSTILE, (1,), HOSTILE), 0, (1,), (-0.1,), "length", 1, "a" * 10**6, 1.0
    )
    path = RunDirectory(run).rollouts(1)
    write_rollouts(path, [*read_rollouts(path), long])
    path.write_bytes(path.read_bytes().replace(b"1+1=2;[2]", b"bytes \xff\xfe"))
    report = write_report([run], tmp_path / "report.html")
    assert report.stat().st_size < 500_000
    open_report(browser, report, width=400, height=300)
    assert browser.run("document.getElementById('reader-list').scrollTop") == 0
    shown = browser.run("document.getElementById('reader-detail').textContent")
    assert "<img src=x onerror=fail()>" in shown
    assert "\u202e" not in shown
    browser.press("j")
    browser.wait(
        "document.querySelector('#reader-detail pre:nth-of-type(2)').textContent === 'bytes ��'"
    )
    browser.press("j")
    browser.wait(
        "document.getElementById('reader-detail').textContent.includes('992,000 characters')"
    )
    assert "right, not finished" in chosen(browser)
    assert browser.run("document.querySelectorAll('#rollouts img, #rollouts script').length") == 0
    assert not browser.run(WIDER_THAN_THE_WINDOW)
    assert browser.console == []
    assert browser.requests == [report.as_uri()]


def test_the_page_follows_a_run_over_its_restart(browser, tmp_path):
    run = make_run(tmp_path / "run", 30, collapse_at=10)
    store_tokens(run, 30, ["one ", "two"], advantage=(0.5, -0.5))
    with ReportServer([run], 0) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        browser.console.clear()
        browser.requests.clear()
        browser.open(server.url)
        browser.wait("document.querySelectorAll('.tokens span').length === 2")
        browser.wait("document.getElementById('status').textContent === 'following'")
        browser.run("document.querySelector('details.figure').open = false")
        sink = JsonlSink(run / "metrics.jsonl", first_step=21)  # the run is resumed
        for step in (21, 22):
            sink.write(step, {"rollout/truncation_rate": 0.5, "time/total": 1.0})
        sink.write_event("guard_warn", 22, {"evidence": {"slope": 0.5}})
        sink.close()
        browser.wait("document.querySelector('.tiles').textContent.includes('22 of 800')")
        browser.wait("document.querySelector('.events')?.textContent.includes('guard warn')")
        assert not browser.run("document.querySelector('details.figure').open")
        plots = browser.run("document.querySelectorAll('.figure[open] .plot').length")
        assert browser.run(DRAWN) == plots > 20
        write_rollouts(RunDirectory(run).rollouts(31), read_rollouts(RunDirectory(run).rollouts(1)))
        browser.wait("document.getElementById('reader-step').value === '31'")
        browser.wait("document.querySelector('.facts').textContent.includes('step 31')")
        browser.press("j")
        assert "truncated" in chosen(browser)
        server.shutdown()
        thread.join()
    browser.wait("document.getElementById('status').textContent.startsWith('no answer')")
    assert set(browser.requests) == {server.url}
    gone = re.compile("ERR_CONNECTION_|ERR_SOCKET_NOT_CONNECTED")
    assert [line for line in browser.console if not gone.search(line)] == []
