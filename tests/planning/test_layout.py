"""What a layout divides into, and what is refused."""

from __future__ import annotations

import pytest

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.planning.layout import Layout, valid_layouts
from stable_opd_mcore.planning.plan import Cluster, make_plan, read_models
from tests.planning.cases import NODE, config_7b


def test_refusals_name_both_numbers(tmp_path):
    with pytest.raises(UserError, match=r"= 4 does not divide 6 trainer GPUs"):
        make_plan(config_7b(tmp_path), Cluster(1, 6))
    with pytest.raises(UserError, match=r"parallel.tensor=8 does not divide .*heads=28"):
        make_plan(config_7b(tmp_path, "parallel.tensor=8"), NODE)
    with pytest.raises(UserError, match="--gpu a100: unknown; expected one of h100, h200"):
        make_plan(config_7b(tmp_path), NODE, gpu="a100")
    with pytest.raises(UserError, match=r"student.path=/nowhere: .* only its config.json"):
        make_plan(config_7b(tmp_path, "student.path=/nowhere"), NODE)


def test_every_valid_layout_divides_gpus_heads_and_layers(tmp_path):
    model = read_models(config_7b(tmp_path)).student
    layouts = list(valid_layouts([model], gpus=64, gpus_per_node=8))
    assert len(set(layouts)) == len(layouts)
    assert Layout(64, 4, 4, 1, 2, sequence=True) in layouts
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 64
        assert model.num_key_value_heads % layout.tensor == model.num_layers % layout.pipeline == 0
