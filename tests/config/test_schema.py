"""The whole of a run: its directory, and sections that do not go together."""

import pytest

from stable_opd_mcore.config.training import LONGEST_WAIT_MINUTES
from stable_opd_mcore.errors import ConfigError
from stable_opd_mcore.serving import timeouts
from tests.config.cases import run_of, run_with

SERVED = "teacher.engine=sglang teacher.urls=[http://a:1]"
SGLANG = "rollout.engine=sglang"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("student={}", "neither student.path nor student.architecture is set"),
        ("tokenizer={}", "neither tokenizer.path nor student.path names a tokenizer"),
        (
            f"{SERVED} sampling.temperature=0.7",
            "temperature=0.7 .* scores prompts only at temperature 1.*set sampling.temperature=1",
        ),
        (
            "mixture.lambda=0.1 data.train.path=d.jsonl data.train.columns.solution=null",
            "mixture.lambda > 0 with no column of golden solutions in data.train: set data.train",
        ),
        (
            f"{SGLANG} fault.watchdog_minutes=40",
            "watchdog_minutes=40 .* may wait 40 minutes: .*; set it to more than that, or to null",
        ),
        (f"{SERVED} fault.watchdog_minutes=3", "watchdog_minutes=3 .* may wait 40 minutes"),
        (
            f"{SGLANG} memory.offload=[student]",
            "`student`.*placement=disaggregated; leave it out, or colocate SGLang servers",
        ),
        ("data.train=[]", "data: train is an empty list"),
        ("optimizer.lr=1e-5 optimizer.min_lr=1e-4", "min_lr=0.0001 exceeds optimizer.lr=1e-05"),
        ('data.train=[{"path":a,"wigth":1}]', "unknown key data.train.0.wigth; keys of data.train"),
        ('data.train=[{"path":a,"weight":0}]', "data.train.0.weight: Input should be"),
        (
            SERVED + ' data.train=[{"path":a,"teacher":b}]',
            "teacher 'b' of a is not a key of teacher.routes; name one of these: none",
        ),
        ("objective.jsd_beta=1", "objective.jsd_beta: Input should be less than 1"),
        ("objective.discount=1.1", "objective.discount: Input should be less than or eq"),
    ],
)
def test_sections_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of(settings)


def test_colocated_servers_have_everything_offloaded_unless_told_otherwise():
    colocated = {"engine": "sglang", "sglang": {"placement": "colocated"}}
    everything = ("student", "optimizer", "gradients", "frozen")
    assert run_with(rollout=colocated).offloaded == everything
    assert run_with(rollout=colocated, memory={"offload": []}).offloaded == ()
    assert run_with(rollout={"engine": "sglang"}).offloaded == ()
    assert run_with(memory={"offload": ["frozen"]}).offloaded == ("frozen",)


def test_the_watchdog_waits_longer_than_any_wait_for_servers():
    teacher = timeouts.TEACHER_PATIENCE + timeouts.SCORE
    longest = max(timeouts.START, timeouts.REQUEST, timeouts.BUCKET, teacher)
    assert longest <= 60 * LONGEST_WAIT_MINUTES
    for minutes in (LONGEST_WAIT_MINUTES + 1, None):
        run_with(rollout={"engine": "sglang"}, fault={"watchdog_minutes": minutes})


@pytest.mark.parametrize("name", ["../up", "", ".hidden", "a/b", "a b", "-x"])
def test_a_name_that_is_no_directory_of_its_own_is_refused(name):
    with pytest.raises(ConfigError, match=r"run\.name: String should match pattern"):
        run_with(run={"name": name})
