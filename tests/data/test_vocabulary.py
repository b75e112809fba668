"""Tokens with other names under one id, and vocabularies that cannot be compared."""

import json

import pytest

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.data.vocabulary import RenamedToken, same_vocabulary
from stable_opd_mcore.errors import UserError


@pytest.fixture
def saved(tmp_path):
    Tokenizer.load("synthetic").save(tmp_path)
    return tmp_path


def edited(directory, edit):
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    edit(tokenizer)
    path.write_text(json.dumps(tokenizer))
    return Tokenizer.load(str(directory))


def test_added_tokens_with_other_names_or_on_one_side_are_reported(saved):
    def edit(tokenizer):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 24, "content": "t"})

    for path in saved.glob("*.json"):
        path.write_text(path.read_text().replace('"!"', '"<user>"'))
    found = same_vocabulary(Tokenizer.load("synthetic"), edited(saved, edit))
    assert found == [RenamedToken(21, "!", "<user>"), RenamedToken(24, None, "t")]


def test_another_base_token_is_refused_with_both_paths(saved):
    def edit(tokenizer):
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary["3"], vocabulary["4"] = vocabulary["4"], vocabulary["3"]

    with pytest.raises(UserError, match=rf"synthetic and {saved} .* id 3 is '3' in .* '4' in"):
        same_vocabulary(Tokenizer.load("synthetic"), edited(saved, edit))
