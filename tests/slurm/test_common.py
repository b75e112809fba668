"""Functions of common.sh with stand-ins for Slurm's commands."""

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from stable_opd_mcore.config.load import load_config, save_config

REPOSITORY = Path(__file__).parents[2]
SRUN = """#!/bin/bash
echo running >"$ATTEMPT_DIR/running"
until [ -e "$ATTEMPT_DIR/signalled" ]; do sleep 0.1; done
"""
SMOKE = "configs/smoke_cpu.yaml"
PROBE = """#!/bin/bash
[[ $* != *--nodelist=n3* ]] && touch "${@: -1}"
"""


def run_function(tmp_path: Path, function: str, **programs: str) -> str:
    """Source common.sh, call a function of it with these programs in front; its output."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in programs.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    nodes = "TRAINER_NODES=(n1) SERVER_NODE_NAMES=() TRAINER=(train)"
    answer = subprocess.run(
        ["bash", "-c", f"source slurm/common.sh; {nodes}; mkdir -p $ATTEMPT_DIR; {function}"],
        cwd=REPOSITORY,
        env=os.environ
        | {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "LOG_DIR": str(tmp_path),
            "http_proxy": "http://proxy:3128",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


def test_the_trainer_is_stopped_when_a_server_was_given_up(tmp_path):
    programs = {
        "srun": SRUN,
        "squeue": "#!/bin/bash\necho 7.1 trainer\n",
        "scancel": '#!/bin/bash\necho "$@" >"$ATTEMPT_DIR/signalled"\n',
        "scontrol": "#!/bin/bash\necho JobId=7 EndTime=Unknown Deadline=N/A\n",
    }
    began = time.monotonic()
    told = run_function(tmp_path, 'touch "$ATTEMPT_DIR/server_0.given_up"; run_trainer', **programs)
    assert time.monotonic() - began < 20
    assert "trainer step ended with code 0" in told
    signal = (tmp_path / "attempt_0" / "signalled").read_text()
    assert signal == "--signal=USR1 7.1\n"


def test_the_trainer_is_left_shortly_before_the_job_ends(tmp_path):
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + 10))
    programs = {
        "srun": "#!/bin/bash\nexec sleep 15 >/dev/null 2>&1\n",
        "squeue": "#!/bin/bash\n",
        "scontrol": f"#!/bin/bash\necho JobId=7 EndTime={end} Deadline=N/A\n",
    }
    began = time.monotonic()
    told = run_function(tmp_path, 'touch "$ATTEMPT_DIR/server_0.given_up"; run_trainer', **programs)
    assert time.monotonic() - began < 14
    assert "the trainer has not stopped 25 s before the end of the job" in told


def test_silent_nodes_are_probed_without_waiting_for_servers(tmp_path):
    nodes = "TRAINER_NODES=(n1 n2 n3) SERVER_NODE_NAMES=(n4)"
    server = "sleep 30 >/dev/null 2>&1 & server=$!"
    began = time.monotonic()
    run_function(tmp_path, f"{nodes}; {server}; probe_nodes; kill $server", srun=PROBE)
    assert time.monotonic() - began < 25
    alive = sorted(path.name for path in (tmp_path / "attempt_0").glob("alive_*"))
    assert alive == ["alive_n2", "alive_n4"]


def test_a_node_is_found_silent_although_the_time_limit_comes_near_meanwhile(tmp_path):
    """The trainer fails, and USR1 arrives while the nodes are probed."""
    srun = """#!/bin/bash
    [[ $* == *--job-name=alive* ]] || exit 1
    kill -USR1 "$BATCH"
    [[ $* == *--nodelist=n3* ]] && exec sleep 2 || touch "${@: -1}"
    """
    shell = "export BATCH=$$; trap 'STOP_WANTED=USR1' USR1; TRAINER_NODES=(n1 n2 n3)"
    told = run_function(
        tmp_path,
        f"{shell}; HOST_PYTHON={sys.executable}; run_trainer; judge_run; echo next $NEXT",
        srun=srun,
        scontrol="#!/bin/bash\n",
    )
    assert told.endswith("next exclude\n")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["excluded"]) == ("lost", ["n3"])


def test_a_container_is_unpacked_once_an_attempt_and_removed_at_its_end(tmp_path):
    """By its name; not where Slurm ends the job, or where the time limit is near."""
    shell = (
        f"CONTAINER_IMAGE=/images/opd.sqsh HOST_PYTHON={sys.executable} TRAINER_NODES=(n1 n2)\n"
        'step preflight n1,n2 1; echo "${STEP[@]}"\n'
        "judge record failed first; STOP_WANTED=TERM; judge record failed second\n"
        "STOP_WANTED=USR1; END=$(date -d '20 seconds' +%FT%T); export END\n"
        "judge record stopped third --action=end; exit 0"
    )
    told = run_function(
        tmp_path,
        shell,
        srun='#!/bin/bash\necho "$@" >>"$ATTEMPT_DIR/sruns"\n',
        scontrol="#!/bin/bash\necho JobId=7 EndTime=${END:-Unknown} Deadline=N/A\n",
    )
    named = "--container-image=/images/opd.sqsh --container-name=stable_opd_7_0"
    assert f"{named} --container-writable" in told
    removals = (tmp_path / "attempt_0/sruns").read_text().splitlines()
    assert len(removals) == 2
    for node, line in zip(
        ("n1", "n2"), sorted(removals, key=lambda each: "=n2" in each), strict=True
    ):
        assert f"--nodelist={node} " in line
        assert line.endswith("enroot remove --force pyxis_stable_opd_7_0")
        assert "--container" not in line


def test_kernels_are_cached_in_a_folder_that_the_container_has(tmp_path):
    show = "set_environment; env | grep -E 'CACHE|WORKSPACE_BASE' | sort"
    tools = {"getent": "#!/bin/bash\n"}
    told = run_function(tmp_path, f"CACHE_DIR=/shared/cache; {show}", **tools)
    assert "SGLANG_JIT_CACHE_DIR=/shared/cache/sglang/jit\n" in told
    assert "TRITON_CACHE_DIR=/shared/cache/triton\n" in told
    default = (
        "CONTAINER_IMAGE=/i bash -c 'source slurm/common.sh; echo $CACHE_DIR $PREFLIGHT_TIMEOUT'"
    )
    (tmp_path / "again").mkdir()
    told = run_function(tmp_path / "again", default)
    assert told == f"{REPOSITORY}/runs/cache 900\n"


def test_nodes_are_reached_without_the_proxy(tmp_path):
    told = run_function(
        tmp_path,
        "set_environment; echo $NO_PROXY",
        getent="#!/bin/bash\necho 10.0.0.5\n",
    )
    assert told == "localhost,127.0.0.1,n1,10.0.0.5\n"


def test_health_asks_the_server_and_not_the_proxy():
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        environment = os.environ | {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        codes = [
            subprocess.run([sys.executable, "slurm/health.py", url + path], env=environment,
                           cwd=REPOSITORY, timeout=60).returncode
            for path in ("/health", "/other")
        ]  # fmt: skip
        server.shutdown()
    assert codes == [0, 1]


def test_a_run_that_does_not_fit_is_refused_with_its_numbers(tmp_path):
    ready = f"PYTHON=({sys.executable}); COMMAND_LINE=(configs/stable_opd_7b.yaml"
    too_large = f"{ready} parallel.tensor=1 parallel.sequence=false)"
    check = 'check_plan train; echo "code $?"; echo "$PLANNED"'
    told = run_function(
        tmp_path, f"{too_large}; {check}; PLAN=off; {check}; PLAN=on; {ready}); {check}"
    )
    refused, started, fits = told.split("code ")[1:]
    assert refused.startswith("1\n")
    assert "DOES NOT FIT: 135.0 GiB of a h200 are usable" in refused
    assert "fastest that fits: train.recompute=" in refused
    assert started.strip() == "0"
    assert fits.startswith("0\n")
    assert "fits: 135.0 GiB" in fits


def test_a_run_with_errors_or_unaccepted_changes_is_refused_with_what_was_found(tmp_path):
    directory = f"run.directory={tmp_path}"
    trained = load_config(REPOSITORY / SMOKE, [directory])
    (trained.run.path / "checkpoints" / "step_000001").mkdir(parents=True)
    save_config(trained, trained.run.path / "config.resolved.yaml")
    given = f"COMMAND_LINE=({SMOKE} {directory} kl.beta=0.5"
    check = 'check_run train; echo "code $?"; echo "$CHECKED"'
    told = run_function(
        tmp_path,
        f"GPU=cpu; PYTHON=({sys.executable}); OPTIONS=(); {given} sampling.max_new_tokens=256); "
        f"{check}; CHECK=off; {check}; CHECK=on; "
        f"OPTIONS=(--quiet --accept-changes); {given}); {check}",
    )
    refused, skipped, accepted = told.split("code ")[1:]
    assert refused.startswith("1\n")
    assert "ERROR  window: responses leave no prompt in the student's window" in refused
    assert "resume with the new ones: --accept-changes" in refused
    assert skipped.strip() == "0\nchecks of the run: skipped"
    assert accepted.startswith("0\n")
    assert "kl.beta" in accepted


def test_jobs_whose_nodes_it_would_not_know_are_refused_before_anything_starts(tmp_path):
    told = run_function(
        tmp_path,
        "export SLURM_JOB_NODELIST=n1; SLURM_HET_SIZE=2 split_nodes || echo refused; "
        "PATH=${PATH%%:*}; split_nodes || echo refused",
        date="#!/bin/bash\n",
    )
    first, second = told.split("refused\n")[:2]
    assert "heterogeneous job of 2 components" in first
    assert "SERVER_NODES=N" in first
    assert "scontrol is not found" in second


def test_one_job_has_one_config(tmp_path):
    told = run_function(tmp_path, "run_on_cluster train a.yaml b.yaml c.yml || echo $?")
    refused, code = told.splitlines()
    assert "one job has one config, but b.yaml c.yml are given" in refused
    assert code == "2"
