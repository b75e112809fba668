"""Layout, memory and precision."""

import pytest
import torch
from safetensors.torch import save_file

from stable_opd_mcore.commands.check import gpu_fit
from stable_opd_mcore.commands.plan.plan import Cluster
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.inputs.run_inputs import Place, RunInputs
from stable_opd_mcore.models.description.architecture import read_architecture
from stable_opd_mcore.models.tensors import hf_shapes
from tests.commands.check.directories import write_model
from tests.commands.plan.cases import config_7b
from tests.train.runs import tiny_config

ONE_NODE = Place(Cluster(1, 8), "h200")


@pytest.mark.parametrize(
    ("parallel", "place", "words"),
    [
        ({"tensor": 4}, None, "the student does not fit the layout: parallel.tensor=4 does not"),
        ({"pipeline": 3}, None, "2 layers do not divide into parallel.pipeline=3"),
        ({"tensor": 2, "pipeline": 2}, Place(Cluster(1, 6), "h200"), "= 4 does not divide 6 train"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(parallel, place, words, tmp_path):
    with pytest.raises(UserError, match=words):
        gpu_fit.layout(RunInputs(tiny_config(tmp_path, "run", parallel=parallel), place))


def test_memory_is_an_error_only_where_nothing_fits(tmp_path):
    assert list(gpu_fit.memory(RunInputs(config_7b(tmp_path), ONE_NODE))) == []
    large = config_7b(tmp_path, "train.micro_batch_tokens=262144")
    (finding,) = gpu_fit.memory(RunInputs(large, ONE_NODE))
    assert finding.severity == "warning"
    assert finding.remedy.startswith("train.micro_batch_tokens=")
    one_gpu = config_7b(tmp_path, "parallel.tensor=1", "parallel.sequence=false")
    (finding,) = gpu_fit.memory(RunInputs(one_gpu, Place(Cluster(1, 1), "h100")))
    assert (finding.severity, finding.remedy[:24]) == ("error", "a larger parallel.tensor")
    (finding,) = gpu_fit.memory(RunInputs(one_gpu, Place(Cluster(1, 8), "h100")))
    assert (finding.severity, finding.remedy[:16]) == ("warning", "train.recompute=")
    assert finding.values[1] == ("usable of a h100", "75.6 GiB")
    assert list(gpu_fit.memory(RunInputs(one_gpu, Place(Cluster(1, 1), "cpu")))) == []
    other = RunInputs(one_gpu, Place(Cluster(1, 1), "nvidia a100"))
    (finding,) = gpu_fit.memory(other)
    assert (finding.severity, finding.values[0]) == ("note", ("GPU", "nvidia a100"))
    gpu_fit.layout(other)


def test_the_fact_is_the_memory_of_the_plan(tmp_path):
    (memory,) = gpu_fit.facts(RunInputs(config_7b(tmp_path), ONE_NODE))
    assert memory.startswith("memory by `stable-opd plan`: ")
    assert memory.endswith(" of 135.0 GiB of a h200, in the rollout phase")


@pytest.mark.parametrize(
    ("stored", "said", "found"),
    [
        (torch.float16, "bfloat16", ["F16"] * 3),
        (torch.float32, "bfloat16", ["F32"] * 3),
        (torch.bfloat16, "float32", []),
        (torch.bfloat16, "bfloat16", []),
    ],
)
def test_models_whose_files_have_more_bits_than_are_loaded_are_found(stored, said, found, tmp_path):
    path = write_model(tmp_path / "model", torch_dtype=said, vocab_size=261)
    shapes = hf_shapes(read_architecture(path))
    tensors = {name: torch.zeros(shape, dtype=stored) for name, shape in shapes.items()}
    save_file(tensors, f"{path}/model.safetensors")
    models = {name: {"path": path, "architecture": None} for name in ("student", "teacher")}
    models |= {"reference": {"path": path}, "kl": {"beta": 0.1}}
    config = tiny_config(
        tmp_path, "run", tokenizer={"path": None}, train={"precision": "bf16"}, **models
    )
    findings = list(gpu_fit.precision(RunInputs(config, None)))
    assert [finding.values[0][1] for finding in findings] == found
    assert all(finding.severity == "warning" for finding in findings)


def test_servers_that_do_not_fit_the_gpus_are_refused_where_the_gpu_is_known(tmp_path):
    served = (
        "rollout.sglang.placement=colocated",
        "rollout.sglang.num_servers=3",
        "rollout.sglang.tensor=4",
    )
    config = config_7b(tmp_path, *served)
    with pytest.raises(UserError, match="4 too many"):
        gpu_fit.layout(RunInputs(config, ONE_NODE))
    gpu_fit.layout(RunInputs(config, Place(Cluster(1, 8), "a100")))
    gpu_fit.layout(RunInputs(config_7b(tmp_path), ONE_NODE))


def test_fp8_that_does_not_fit_is_refused_and_sampling_without_it_is_found(tmp_path):
    every = {"student": "tensorwise", "teacher": "blockwise", "reference": "blockwise"}
    config = tiny_config(tmp_path, "run", fp8=every)
    gpu_fit.layout(RunInputs(config, None))
    (finding,) = gpu_fit.precision(RunInputs(config, None))
    assert finding.values == (("fp8.student", "tensorwise"), ("sampled in", "float32"))
    with pytest.raises(UserError, match=r"fp8.student=tensorwise with train.precision=fp32"):
        gpu_fit.layout(RunInputs(config, ONE_NODE))
    two = tiny_config(tmp_path, "run", fp8={"teacher": "blockwise"}, parallel={"tensor": 2})
    with pytest.raises(UserError, match=r"fp8.teacher=blockwise: .*o_proj.weight is \d+ x 24"):
        gpu_fit.layout(RunInputs(two, None))
