"""Operations that make the host wait are counted where they stand; others are not."""

import pytest
import torch

from stable_opd_mcore.commands.rehearse import host_waits
from stable_opd_mcore.commands.rehearse.fake_tensors import fake_tensors
from stable_opd_mcore.commands.rehearse.host_waits import HostWaits
from stable_opd_mcore.commands.rehearse.rank import rehearse_rank
from stable_opd_mcore.parallel.transfers import OnHost
from stable_opd_mcore.train.samples import sharing
from tests.commands.plan import cases
from tests.models.tiny import microbatch

WAITS = {
    "float": lambda x, mask: float(x.sum()),
    "tolist": lambda x, mask: x.tolist(),
    "bool": lambda x, mask: bool(mask.any()),
    "cpu": lambda x, mask: x.cpu().tolist(),
    "getitem": lambda x, mask: mask[mask],
    "nonzero": lambda x, mask: mask.nonzero(),
    "new_tensor": lambda x, mask: x.new_tensor([1.0]),
}
FREE = (
    lambda x, mask: torch.where(mask, x, 0.0).sum(),
    lambda x, mask: x.masked_fill(mask, 1.0)[mask.long()],
    lambda x, mask: torch.arange(3).tolist(),
)


@pytest.fixture
def counting(monkeypatch):
    """Values on the device, and the places that were counted; this file counts as the package."""
    monkeypatch.setattr(host_waits, "_place", lambda: "here")
    with fake_tensors(), HostWaits() as waits:
        batch = sharing.to_device(microbatch([5, 3]), "cpu")
        yield torch.zeros(len(batch.rows_N)), batch.golden_N, waits.places


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_is_counted_once(counting, name):
    x, mask, places = counting
    WAITS[name](x, mask)
    assert dict(places) == {f"here {name}": 1}


def test_what_does_not_wait_is_not_counted(counting):
    x, mask, places = counting
    for operation in FREE:
        operation(x, mask)
    assert not places


def test_a_copy_is_free_where_the_host_has_waited_since(counting):
    x, _, places = counting
    early, late = OnHost(x), OnHost(x)
    early.values().tolist()
    assert dict(places) == {"here tolist": 1}
    late.values().tolist()
    assert places.total() == 1


ONCE = ["megatron/core/optimizer/clip_grads.py", "models/weights.py"]
STEPS = {  # settings added to the 7B config -> files of this package and Megatron that wait
    "as shipped": ([], ONCE),
    "context parallelism": (["parallel.context=2", "parallel.tensor=2"], ONCE),
    "golden tokens at another temperature, corrected rollouts": (
        ["sampling.temperature=0.7", "rollout.importance_correction=truncated"],
        ["losses/token_weights.py", *ONCE],
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_the_7b_config_waits_for_the_gradient_norm_and_the_weights(
    tmp_path, monkeypatch, name
):
    """None of the many micro-batches waits. The cut model has the layers' shapes."""
    overrides, files = STEPS[name]
    monkeypatch.setitem(cases.QWEN_7B, "num_hidden_layers", 2)
    small = ["rollout.prompts_per_step=1", "sampling.max_new_tokens=800", "memory.offload=[]"]
    config = cases.config_7b(tmp_path, "train.micro_batch_tokens=1056", *small, *overrides)
    report = rehearse_rank(config, 8, 0, prompt_tokens=256, vocab_size=151665)
    assert sorted(place.partition(":")[0] for place in report.host_waits) == sorted(files)
    assert sum(report.host_waits.values()) == len(files)
