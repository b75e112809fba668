"""The built-in tokenizer: texts of the task come back, others are refused."""

import pytest

from stable_opd_mcore.data.chat import Tokenizer
from stable_opd_mcore.errors import DataError


@pytest.fixture(scope="module")
def synthetic():
    return Tokenizer.load("synthetic")


def test_synthetic_round_trip(synthetic):
    assert synthetic.vocab_size == 24
    assert synthetic.decode(synthetic.encode(synthetic.render_prompt("2+1-3"))) == "2+1-3#"
    response = [*synthetic.encode("2+1=3;3-3=0;[0]"), synthetic.stop_token_ids[0]]
    assert synthetic.decode(response) == "2+1=3;3-3=0;[0]"
    # A stop in the middle, a second stop and padding stay visible.
    assert synthetic.decode(synthetic.encode("1$2!.3$")) == "1$2!.3"


def test_synthetic_saved_and_loaded_is_the_same(synthetic, tmp_path):
    synthetic.save(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.render_prompt("4*3") == synthetic.render_prompt("4*3")
    assert loaded.decode(loaded.encode("w4*3=2;[2]!")) == "w4*3=2;[2]!"
    assert loaded.stop_token_ids == synthetic.stop_token_ids
    assert loaded.names_by_id == synthetic.names_by_id
    with pytest.raises(DataError, match="lacks"):
        loaded.encode("Hello")
