"""Choices of experts as text."""

import base64

import numpy as np
import pytest

from stable_opd_mcore.records import Routing


def test_choices_of_experts_are_parsed_and_checked():
    routing = Routing(num_layers=2, num_experts=300, per_token=2)
    chosen = np.array([[[5, 299], [0, 1]], [[7, 8], [9, 2]], [[1, 0], [3, 4]]], dtype=np.int32)

    def parse(array: np.ndarray, positions: int = 3):
        encoded = base64.b64encode(array.tobytes()).decode()
        return routing.parse(encoded, array.dtype, positions)

    for dtype in (np.int32, np.uint16):
        assert (parse(chosen.astype(dtype)) == chosen).all()
        with pytest.raises(ValueError, match=r"outside 0 .. 299"):
            parse((chosen + 1).astype(dtype))
    with pytest.raises(ValueError, match=r"outside 0 .. 299"):
        parse(chosen - 1)
    with pytest.raises(ValueError, match="12 experts for 2 x 4 choices"):
        parse(chosen, positions=2)
    with pytest.raises(ValueError, match="chosen twice"):
        parse(np.zeros_like(chosen))
    for text in ("***", "é", "AAA"):
        with pytest.raises(ValueError, match=r"[Bb]ase64|ASCII|padding"):
            routing.parse(text, np.int32, 3)
