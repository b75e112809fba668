"""What a layout divides into, and what is refused."""

import pytest

from stable_opd_mcore.commands.plan.planned_run import read_models
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.training import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.placement.layout import Layout, layout_of, refusal, valid_layouts
from tests.commands.plan.cases import CONFIGS, config_7b


def test_every_valid_layout_divides_gpus_heads_and_layers(tmp_path):
    model = read_models(config_7b(tmp_path)).student
    layouts = [layout_of(valid, 64) for valid in valid_layouts([model], 64, gpus_per_node=8)]
    assert len(set(layouts)) == len(layouts)
    assert Layout(64, 4, 4, 1, 2, sequence=True) in layouts
    for layout in layouts:
        assert layout.tensor * layout.pipeline * layout.context * layout.data == 64
        assert model.num_key_value_heads % layout.tensor == model.num_layers % layout.pipeline == 0
        assert layout.expert == 1  # nothing to share out


def test_experts_are_shared_out_over_ranks_of_a_stage():
    models = read_models(load_config(CONFIGS / "stable_opd_8b_235b.yaml"))
    assert models.teacher is not None
    both = [models.student, models.teacher]
    layouts = [layout_of(valid, 16) for valid in valid_layouts(both, 16, gpus_per_node=8)]
    assert Layout(16, 4, 1, 1, sequence=True, expert=16) in layouts
    assert Layout(16, 1, 2, 1, expert=8) in layouts
    for layout in layouts:
        assert layout.expert_copies * layout.expert * layout.pipeline == 16
        assert layout.tensor % layout.expert == 0 or layout.expert % layout.tensor == 0
    with pytest.raises(UserError, match=r"parallel.expert=16 does not divide the 8 GPUs of each"):
        layout_of(ParallelConfig(pipeline=2, expert=16), 16)
    refused = refusal(models.teacher, ParallelConfig(expert=3))
    assert refused is not None
    assert refused.startswith("parallel.expert=3 does not divide the 128 experts")
