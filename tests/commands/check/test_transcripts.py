"""Checks of the text that a teacher reads between two turns, and the transcript they show."""

import json
import re

import pytest

from stable_opd_mcore.commands.check.checklist import check_config
from stable_opd_mcore.commands.check.transcripts import different_bridges, shown_transcript
from stable_opd_mcore.inputs.run_inputs import RunInputs
from stable_opd_mcore.records import Sample
from tests.commands.check.directories import TEMPLATE, the, write_model
from tests.train.runs import tiny_config

OPENS = TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
NO_TOOLS = TEMPLATE.replace(
    "{% for", "{{ raise_exception('No!') if messages[-1].role == 'tool' }}{% for", 1
)
NO_USERS = TEMPLATE.replace(
    "{% for",
    "{{ raise_exception('No!') if messages[1:] and messages[-1].role == 'user' }}{% for",
    1,
)
# What it writes depends on the message's number, so history=append is refused.
NUMBERED = TEMPLATE.replace("<|im_end|>", "{{ ' again' if loop.index == 5 }}<|im_end|>")
ENDS_OTHERWISE = TEMPLATE.replace("<|im_end|>", "<|box_start|>")
TURNS = [
    {"role": role, "content": content}
    for role, content in (("user", "1+1?"), ("assistant", "2"), ("tool", "So?"), ("assistant", "3"))
]
GAME = """
def episode(row, seed):
    said = yield None
    yield f"You said {said} of {row['hint']}."
    return 0.5

def restarting(row, seed):
    yield "Room 1."
    yield {"restart": "Room 2."}
    return 1

def endless(row, seed):
    yield None
    while True:
        yield ""

def failing(row, seed):
    yield "Room 1."
    raise KeyError("door")

def rewriting(row, seed, base_url):
    import json, urllib.request
    messages = [{"role": "user", "content": "Room 1."}]
    for _ in range(3):
        body = json.dumps({"model": "student", "messages": messages}).encode()
        request = urllib.request.Request(base_url + "/chat/completions", body)
        with urllib.request.urlopen(request) as reply:
            said = json.load(reply)["choices"][0]["message"]["content"]
        said = said if len(messages) == 1 else "I said nothing."
        messages += [{"role": "assistant", "content": said}, messages[0]]
    return 1
"""
OFF_POLICY = {"objective": {"name": "gkd", "on_policy_fraction": 0.5}}


def config_of(tmp_path, golden="all", role="tool", prompt=None, sections=OFF_POLICY, **models):
    rows = tmp_path / "rows.jsonl"
    turns = [{**turn, "role": role} if turn["role"] == "tool" else turn for turn in TURNS]
    row = {"messages": turns, "hint": "2"}
    rows.write_text("".join(json.dumps({**row, "id": str(n)}) + "\n" for n in range(8)))
    columns = {"messages": "messages", "answer": None, "golden": golden}
    sections = dict(sections)
    for name in ("student", "teacher"):
        path = write_model(tmp_path / name, template=models.get(name, TEMPLATE))
        sections[name] = {"path": path, "architecture": None}
    sections["teacher"] |= {"prompt": prompt} if prompt else {}
    data = {"train": {"path": str(rows), "columns": columns}, "eval": None}
    settings = {"data": data, "tokenizer": {"path": None}, "evaluation": {"every": 0}, **sections}
    return tiny_config(tmp_path, "run", **settings)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, None),
        ({"teacher": OPENS}, "'<|im_end|>\\n<|im_start|>tool\\n...<|im_end|>\\n<|im_start|>assis"),
        ({"teacher": ENDS_OTHERWISE}, "'<|box_start|>\\n<|im_start|>tool\\n..."),
        ({"teacher": NO_TOOLS}, "a tool message cannot follow a turn of the assistant"),
        ({"teacher": NO_TOOLS, "role": "user"}, None),
        ({"teacher": None}, None),
        ({"teacher": OPENS, "golden": "last"}, None),
        ({"teacher": OPENS, "sections": {"objective": {"name": "opd"}}}, None),
        ({"teacher": OPENS, "student": OPENS}, None),
    ],
)
def test_a_teacher_that_scores_turns_writes_the_same_between_them(tmp_path, changes, shown):
    found = list(different_bridges(RunInputs(config_of(tmp_path, **changes), None)))
    assert bool(found) == (shown is not None)
    for finding in found:
        assert finding.severity == "error"
        (_, own), (_, others) = finding.values
        assert own.startswith("'<|im_end|>\\n<|im_start|>tool\\n...<|im_end|>")
        assert shown in others
        assert "tokenizer.path" in finding.remedy


def test_an_example_says_what_is_sampled_and_what_is_observed(tmp_path):
    report = check_config(config_of(tmp_path, prompt="Hint: {{ hint }}"), None)
    (of_student, student), (of_teacher, teacher) = report.transcripts
    after = (
        "[sampled: 2 tokens]\n2<|im_end|>\n"
        "[observed: 23 tokens]\n\n<|im_start|>tool\nSo?<|im_end|>\n<|im_start|>assistant\n\n"
        "[sampled: 2 tokens]\n3<|im_end|>"
    )
    start = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n\n"
    assert of_student == "student"
    assert student == "[prompt: 23 tokens]\n" + start.format("1+1?") + after
    assert of_teacher == "teacher"
    assert teacher == "[prompt: 26 tokens]\n" + start.format("Hint: 2") + after
    assert "[observed: 23 tokens]" in report.text()
    assert json.loads(report.as_json())["transcripts"]["student"] == student


def test_a_long_piece_loses_its_middle_and_one_turn_is_no_transcript(tmp_path):
    inputs = RunInputs(config_of(tmp_path), None)
    ids = inputs.tokenizer.encode("1" * 5000)
    sample = Sample("golden", "p", [9, *ids], [1], 1, [True])
    shown = shown_transcript(inputs.pair.student, [sample])
    assert shown.endswith(f"[observed: 4999 tokens]\n{'1' * 200} ... {'1' * 200}")
    assert not RunInputs(config_of(tmp_path, golden="last"), None).transcript
    report = check_config(config_of(tmp_path, teacher=OPENS), None)
    assert the(report.findings, "the templates write another text around a tool message")


def playing(tmp_path, function, objective=None, history="append", **models):
    (tmp_path / "game.py").write_text(GAME)
    environment = {"function": f"{tmp_path}/game.py:{function}", "history": history}
    sections = {"objective": objective or {"name": "opd"}, "environment": environment}
    return config_of(tmp_path, golden="last", sections=sections, **models)


CALLS = """
def episode(row, seed):
    said = yield None
    if "<call>" in said:
        yield [{"role": "tool", "content": "4"}]
    return 1
"""
WITHOUT_TOOLS = TEMPLATE.replace("messages %}", "messages if message.role != 'tool' %}")


@pytest.mark.parametrize("template", [NO_TOOLS, WITHOUT_TOOLS])
@pytest.mark.parametrize("history", ["append", "template"])
def test_tool_messages_that_no_example_episode_has_are_compared_too(tmp_path, template, history):
    (tmp_path / "game.py").write_text(CALLS)
    environment = {"function": f"{tmp_path}/game.py:episode", "history": history}
    sections = {"objective": {"name": "opd"}, "environment": environment}
    given = {"golden": "last", "role": "user", "sections": sections}

    def errors(**models: str) -> list[tuple[str, str]]:
        found = check_config(config_of(tmp_path, **models, **given), None).errors
        return [(each.subject, each.title) for each in found if each.subject != "models"]

    assert errors() == []
    difference = f"{TITLE} around a tool message between two turns"
    assert errors(teacher=template) == [("chat template", difference)]
    (subject, title), *_ = errors(student=template, teacher=template)
    assert subject == "environment"
    assert "tool" in title
    assert "a user message" in title


TITLE = "the templates write another text"


def test_a_teacher_of_episodes_writes_the_same_around_messages_that_continue_a_context(tmp_path):
    rendered = {"student": NUMBERED, "history": "template"}
    for function, teacher, roles, student in (
        ("episode", TEMPLATE, [], {}),
        ("episode", NO_TOOLS, [], {}),
        ("episode", OPENS, ["user"], {}),
        ("restarting", OPENS, [], {}),
        ("episode", TEMPLATE, [], rendered),
        ("episode", OPENS, ["user"], rendered),
    ):
        inputs = RunInputs(playing(tmp_path, function, teacher=teacher, **student), None)
        titles = [finding.title for finding in different_bridges(inputs)]
        assert titles == [f"{TITLE} around a {role} message between two turns" for role in roles]


OPENING = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n\n"
SAID = "[sampled: 4 tokens]\n1+1<|im_end|>"


@pytest.mark.parametrize(
    ("function", "expected", "line"),
    [
        (
            "episode",
            f"{SAID}\n[observed: 38 tokens]\n\n{OPENING.format('You said 1+1 of 2.')}{SAID}",
            "2 turns, 8 sampled and 38 observed tokens; returned 0.5",
        ),
        (
            "restarting",
            f"[prompt: 26 tokens]\n{OPENING.format('Room 1.')}{SAID}\n\n"
            f"[a new context: 26 tokens]\n{OPENING.format('Room 2.')}{SAID}",
            "2 turns, 8 sampled and 52 observed tokens; returned 1.0",
        ),
        (
            "endless",
            f"[observed: 20 tokens]\n\n{OPENING.format('')}{SAID}",
            "10 turns, 40 sampled and 180 observed tokens; cut by environment.max_turns",
        ),
    ],
)
def test_an_episode_is_shown(tmp_path, function, expected, line):
    report = check_config(playing(tmp_path, function), None)
    assert not [found for found in report.findings if found.subject == "environment"]
    assert (
        f"environment  {tmp_path}/game.py:{function}, data.train row rows.jsonl:1: {line}"
        in report.facts
    )
    for _, text in report.transcripts:
        assert text.endswith(expected)


def test_new_contexts_are_refused_with_settings_that_assume_one(tmp_path):
    discounted = playing(tmp_path, "restarting", objective={"name": "opd", "discount": 0.5})
    errors = check_config(discounted, None).errors
    (error,) = [each for each in errors if each.subject == "environment"]
    assert "its environment begins a new context, and objective.discount=0.5" in error.title


IN_HISTORY = TEMPLATE.replace(  # as gpt-oss's
    "<|im_end|>",
    "{{ '<|endoftext|>' if loop.last and not add_generation_prompt else '<|im_end|>' }}",
)


def test_a_turn_that_ends_otherwise_in_the_history_is_read_so_and_named(tmp_path):
    report = check_config(playing(tmp_path, "episode", student=IN_HISTORY), None)
    note = the(report.findings, "the chat template ends a turn of the history with another")
    assert note.severity == "note"
    assert [value for _, value in note.values] == ["256 '<|endoftext|>'", "258 '<|im_end|>'"]
    _, text = report.transcripts[0]
    assert "[a new context: " in text
    assert "1+1<|im_end|>\n<|im_start|>user\nYou said 1+1 of 2." in text
    assert not [each for each in report.errors if each.subject != "models"]
    discounted = playing(
        tmp_path, "episode", objective={"name": "opd", "discount": 0.5}, student=IN_HISTORY
    )
    errors = [each for each in check_config(discounted, None).errors if each.subject != "models"]
    assert ["the student ends a turn with another token" in each.title for each in errors] == [True]


def test_an_environment_that_fails_at_once_is_found_before_training(tmp_path):
    report = check_config(playing(tmp_path, "failing"), None)
    finding = the(report.findings, "game.py:failing fails in an example episode")
    (_, row), (_, failure) = finding.values
    assert (finding.severity, row) == ("error", "data.train, rows.jsonl:1")
    assert "KeyError: 'door'" in failure
    assert report.transcripts == ()


def test_an_agents_lost_history_is_found_before_training(tmp_path):
    report = check_config(playing(tmp_path, "rewriting"), None)
    (line,) = [line for line in report.facts if line.startswith("environment")]
    assert line.endswith(
        "returned 1.0; 2 contexts, requests: 1 continued, 0 forked, 1 begun, 1 rewritten "
        "(rewritten_edited 1); 12 of 12 sampled tokens trained, 57 of 165 context tokens repeated"
    )
    warning = the(report.findings, "gives turns of the student back in another form")
    assert warning.severity == "warning"
    (_, share), (_, first) = warning.values
    assert share == "50%"
    assert "message 3 of 5" in first


def test_a_row_of_each_source_and_of_the_held_out_data_is_played(tmp_path):
    """Only the held-out rows lack what the environment reads."""
    config = playing(tmp_path, "episode")
    (source,) = config.data.sources
    (tmp_path / "test.jsonl").write_text('{"problem": "1+2", "number": 3}')
    held_out = {"path": str(tmp_path / "test.jsonl"), "columns": {"answer": None}}
    second = source.model_copy(update={"name": "second"})
    data = {
        "train": (source, second),
        "eval": config.data.model_validate({"train": source, "eval": held_out}).eval,
    }
    report = check_config(config.replaced(data=data), None)
    played = [line for line in report.facts if line.startswith("environment")]
    assert [re.search("row (\\S+):", line).group(1) for line in played] == [
        "rows.jsonl:1",
        "second:1",
        "test.jsonl:1",
    ]
    (error,) = [each for each in report.errors if each.subject == "environment"]
    (_, row), (_, failure) = error.values
    assert row == "data.eval, test.jsonl:1"
    assert "KeyError: 'hint'" in failure


def test_a_template_without_messages_after_a_turn_is_refused_before_training(tmp_path):
    report = check_config(playing(tmp_path, "restarting", student=NO_USERS), None)
    refusal = the(report.findings, "environment: ")
    assert refusal.severity == "error"
    assert "a user message cannot follow a turn of the assistant" in refusal.title
