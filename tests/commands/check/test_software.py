"""Which package serves Adam and the norms; an apex that is not NVIDIA's."""

import sys

import pytest

from stable_opd_mcore.commands.check import software


def use_only(monkeypatch, folder, *modules):
    for module in modules:
        path = folder / module
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(sys, "path", [str(folder)])


ENGINE = "transformer_engine/__init__.py"
NVIDIAS = ("apex/__init__.py", "apex/optimizers/__init__.py", "apex/optimizers/fused_adam.py")


@pytest.mark.parametrize(
    ("modules", "adam", "norms", "words"),
    [
        ((ENGINE,), "Transformer Engine", "Transformer Engine", []),
        ((ENGINE, *NVIDIAS), "Transformer Engine", "Transformer Engine", []),
        ((*NVIDIAS, "amp_C.py"), "apex", "torch", ["Transformer Engine is not installed"]),
        (NVIDIAS, "apex", "torch", ["without its CUDA extensions", "Transformer Engine is not"]),
        ((ENGINE, "apex/__init__.py"), *["Transformer Engine"] * 2, ["`apex` is not NVIDIA's"]),
        (("apex.py",), "torch", "torch", ["`apex` is not NVIDIA's", "Transformer Engine is not"]),
        ((), "torch", "torch", ["Transformer Engine is not installed"]),
    ],
)
def test_on_a_gpu(modules, adam, norms, words, tmp_path, monkeypatch):
    use_only(monkeypatch, tmp_path, *modules)
    found = software.installed(on_gpu=True)
    assert found.line() == f"software on a GPU: Adam is {adam}'s, norms are {norms}'s"
    findings = [*software.apex(found), *software.unfused(found)]
    assert len(findings) == len(words)
    for finding, word in zip(findings, words, strict=True):
        assert word in finding.title
        assert finding.severity == ("warning" if "Engine" in word else "error")


def test_on_a_cpu_torch_serves_both_and_the_wrong_apex_is_still_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        use_only(patched, tmp_path, "apex/__init__.py")
        found = software.installed(on_gpu=False)
    assert found.line() == "software on a CPU: Adam is torch's, norms are torch's"
    assert [finding.severity for finding in software.apex(found)] == ["error"]
    assert not list(software.unfused(found))
    here = software.installed(on_gpu=False)  # this environment has no apex
    assert here.apex is None
