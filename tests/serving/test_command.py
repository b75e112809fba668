"""The command and the environment of a server, as data."""

import pytest

from stable_opd_mcore.serving.command import (
    ServerOptions,
    device_names,
    launch_command,
    server_environment,
)

ON_GPU = ServerOptions("/servers/bin/python", "model", device="cuda", gpus=(6, 7), memory_share=0.5)

TRAINERS_OWN = """
RANK LOCAL_RANK GROUP_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE
TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC CUDA_DEVICE_MAX_CONNECTIONS
NVTE_ALLOW_NONDETERMINISTIC_ALGO CUDNN_HOME PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF
PYTHONPATH PYTHONHOME
"""


def environment(options: ServerOptions = ON_GPU, **inherited: str) -> dict[str, str]:
    return server_environment(options, "secret", inherited)


def test_a_gpu_server_is_told_its_share_of_the_memory_and_no_key():
    command = launch_command(ON_GPU, port=30000, owner_pid=7)
    assert command[:2] == ["/servers/bin/python", "-P"]
    assert "--mem-fraction-static 0.5" in " ".join(command)
    assert "--cuda-graph-backend-prefill disabled" in " ".join(command)
    assert not {"--base-gpu-id", "--sleep-on-idle", "--api-key"} & set(command)


def test_what_a_launcher_sets_for_the_trainer_stays_with_the_trainer():
    trainers = dict.fromkeys(TRAINERS_OWN.split(), "1")
    shared = {"NCCL_SOCKET_IFNAME": "bond0", "NCCL_ALGO": "Ring", "HF_HOME": "/hf", "TRANK": "1"}
    found = environment(**trainers, **shared)
    assert not found.keys() & trainers.keys()
    assert shared.items() <= found.items()


def test_programs_of_the_servers_own_environment_come_first():
    """SGLang compiles with the ninja that is installed next to its interpreter."""
    assert environment(PATH="/usr/bin")["PATH"] == "/servers/bin:/usr/bin"


def test_a_folder_for_temporary_files_that_is_not_there_is_left_out(tmp_path):
    """nvcc would end with an error; others take /tmp by themselves."""
    assert environment(TMPDIR=str(tmp_path))["TMPDIR"] == str(tmp_path)
    assert "TMPDIR" not in environment(TMPDIR=str(tmp_path / "of the host"))


def test_cuda_libraries_of_the_servers_own_environment_come_first(tmp_path):
    """tests/integration/test_cuda_environment.py loads them."""
    nvidia = tmp_path / "lib/python3.12/site-packages/nvidia"
    for name in ("cudnn", "cu13"):
        (nvidia / name / "lib").mkdir(parents=True)
    python, own = str(tmp_path / "bin/python"), f"{nvidia}/cu13/lib:{nvidia}/cudnn/lib"
    on_gpu = ServerOptions(python, "model", device="cuda")
    assert environment(on_gpu)["LD_LIBRARY_PATH"] == own
    found = environment(on_gpu, LD_LIBRARY_PATH="/opt/cudnn")
    assert found["LD_LIBRARY_PATH"] == f"{own}:/opt/cudnn"
    assert "LD_LIBRARY_PATH" not in environment(ServerOptions(python, "model"))


def test_a_gpu_servers_nccl_has_the_settings_of_the_trainers():
    found = environment(NCCL_NVLS_ENABLE="1")  # the user's own, for both sides
    assert (found["NCCL_CUMEM_ENABLE"], found["NCCL_NVLS_ENABLE"]) == ("0", "1")
    assert "NCCL_CUMEM_ENABLE" not in environment(ServerOptions("python", "model"))


def test_a_server_sees_its_own_gpus_alone():
    assert environment()["CUDA_VISIBLE_DEVICES"] == "6,7"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("4,5,6,7", ["6", "7"]),  # a job's share of the machine
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-c", "GPU-d"]),
        ("0", ["2", "3"]),  # one GPU for each rank
        ("", ["2", "3"]),
    ],
)
def test_local_ids_become_the_names_of_the_jobs_gpus(visible, names):
    assert device_names((2, 3), visible) == names
