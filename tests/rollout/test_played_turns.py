"""Episodes whose first turns a served teacher plays in a real environment."""

import json
from collections.abc import Iterator

import pytest

from stable_opd_mcore.config.environment_settings import EnvironmentConfig
from stable_opd_mcore.config.models import TeacherConfig
from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.samples import rollout_samples
from stable_opd_mcore.data.synthetic import VOCABULARY
from stable_opd_mcore.endings import Ending
from stable_opd_mcore.records import Prompt, Sampling
from stable_opd_mcore.rollout.episodes import Episode
from stable_opd_mcore.rollout.interaction import Interaction
from stable_opd_mcore.rollout.played_turns import TeacherTurns
from stable_opd_mcore.serving.teacher import ServedTeacher
from tests.serving.http_server import Request, http_server

GAME = """
def episode(row, seed):
    said = yield "1"
    for number in "234":
        said = yield said + number
    return 1.0
"""
SAMPLING = Sampling(max_new_tokens=3, training_step=0, stop_token_ids=(20,))
STUDENT_STOP, TEACHER_STOP = 20, 21
SAID = VOCABULARY.index("+")


@pytest.fixture
def played(tmp_path) -> Iterator[tuple[Interaction, list[list[int]]]]:
    """A teacher that says "+" and one more "+" with each request; what it was asked."""
    (tmp_path / "game.py").write_text(GAME)
    settings = EnvironmentConfig(function=f"{tmp_path / 'game.py'}:episode", workers=1)
    tokenizer, asked = Tokenizer.load("synthetic"), list[list[int]]()

    def reply(request: Request) -> tuple[int, bytes]:
        body = json.loads(request.body)
        asked.append(body["input_ids"])
        most = body["sampling_params"]["max_new_tokens"]
        ids = [*[SAID] * len(asked), TEACHER_STOP][:most]
        meta = {
            "finish_reason": {"type": "stop" if ids[-1] == TEACHER_STOP else "length"},
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
            "weight_version": "default",
        }
        return 200, json.dumps({"output_ids": ids, "text": "", "meta_info": meta}).encode()

    with http_server(reply) as url:
        served = TeacherConfig(engine="sglang", urls=(url,))
        teacher = ServedTeacher(
            served, vocab_size=len(VOCABULARY), temperature=1.0, stop_ids=(TEACHER_STOP,)
        )
        interaction = Interaction({"": settings}, tokenizer, tokenizer, None, 99)
        interaction.teacher_turns = TeacherTurns(teacher, (STUDENT_STOP,))
        yield interaction, asked
        interaction.close()
        teacher.close()


def begun(turns: int, sample: int = 0, prompt_id: str = "s:1") -> Episode:
    prompt = Prompt(prompt_id, "1", (1, 2), columns={}, environment="", num_played=turns)
    return Episode.begin(prompt, sample, 0)


def followed(interaction: Interaction, episode: Episode) -> Episode:
    return episode.after(interaction.observe(episode, SAMPLING, 3).result(60))


def test_all_samples_begin_with_the_teachers_turns_which_have_no_row(played):
    interaction, asked = played
    first, second = (followed(interaction, begun(2, sample)) for sample in range(2))
    assert len(asked) == 2  # the second sample got the turns of the first
    assert first.context.tolist() == second.context.tolist()
    text = "".join(VOCABULARY[token] for token in first.context)
    assert text == "1#+$+2#++$++3#"  # each turn ends as the student's do
    assert asked[1] == first.context[: text.index("#++") + 1].tolist()
    said = [message["content"] for message in first.turns[0].messages]
    assert said == ["1", "+", "+2", "++", "++3"]
    first = first.with_tokens([SAID], [-1.0], Ending.LENGTH, 0, text="+")
    (sample,) = rollout_samples([first.rollout()])
    assert (sample.places.tolist(), sample.num_prompt_tokens) == ([len(text)], len(text))
    assert followed(interaction, first).turns[-1].observed.endswith("+4#")
    again = followed(interaction, begun(1, 0, "s:2"))
    assert "".join(VOCABULARY[token] for token in again.context) == "1#+++$+++2#"  # cut at 3


def test_a_teacher_that_plays_no_turn_fails_the_episode(played):
    interaction, _ = played
    assert interaction.teacher_turns is not None
    interaction.teacher_turns.teacher.lost = "no teacher answered"
    ended = followed(interaction, begun(1))
    assert (ended.finish_reason, ended.failure, ended.reward) == (Ending.FAILED, "crash", 0.0)
    assert "the teacher played no turn: no teacher answered" in str(interaction.first_failure)
