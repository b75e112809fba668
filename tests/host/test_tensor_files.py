"""The mode of a file of tensors."""

import torch
from safetensors.torch import load_file

from stable_opd_mcore.host.tensor_files import save_tensors


def test_file_may_be_read_by_those_who_may_read_its_folder(tmp_path):
    for mode in (0o755, 0o700):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        save_tensors({"a": torch.arange(3)}, folder / "a.safetensors")
        assert (folder / "a.safetensors").stat().st_mode & 0o777 == mode & 0o666
        assert load_file(folder / "a.safetensors")["a"].tolist() == [0, 1, 2]
