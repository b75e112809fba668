"""A rank's place in worlds that do not exist, and what its pipeline neighbours would send."""

import pytest

from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.fake_world import fake_world
from stable_opd_mcore.config.schema import ParallelConfig
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.gpt import build_model
from stable_opd_mcore.models.tensors import hf_shape
from stable_opd_mcore.models.weights import iter_hf_tensors
from tests.models import tiny


def test_every_rank_has_megatrons_place():
    parallel = ParallelConfig(tensor=4, pipeline=2, context=2, sequence=True)
    with fake_world(parallel, gpus=64, rank=63) as world:
        assert (world.tensor_rank, world.context_rank, world.pipeline_rank) == (3, 1, 1)
        assert (world.data_rank, world.data_size, world.batch_size) == (7, 8, 4)
    parallel = ParallelConfig(tensor=8, pipeline=2)
    message = "= 16 does not divide the 8 started"
    with pytest.raises(UserError, match=message), fake_world(parallel, gpus=8):
        pass


@pytest.mark.parametrize(("pipeline", "virtual"), [(1, None), (2, None), (2, 2)])
def test_every_stage_iterates_over_all_tensors(pipeline, virtual):
    architecture = tiny.architecture("qwen2")
    parallel = ParallelConfig(tensor=2, pipeline=pipeline, virtual_pipeline=virtual)
    for stage in range(pipeline):
        with fake_world(parallel, 8, rank=stage * 8 // pipeline) as world, fake_tensors():
            chunks = build_model(architecture, world, seed=None)
            shapes = {name: tuple(tensor.shape) for name, tensor in iter_hf_tensors(chunks)}
        assert len(shapes) == 4 * 12 + 3
        assert all(shape == hf_shape(name, architecture) for name, shape in shapes.items())
