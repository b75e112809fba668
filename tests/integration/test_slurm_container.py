"""The batch script with a container: the run's directory has another path inside than outside.

pyxis is played by an `srun` that binds the mounts in a mount namespace of its own; its root file
system is this machine's.
"""

import os
import shutil
import stat
import sys
from pathlib import Path

import pytest

from tests.integration.slurm_run import PATIENCE_SECONDS, Run

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can bind mounts"),
]
PYXIS = r"""#!/bin/bash
# srun with the options of pyxis; common.sh writes all options as --name=value
options=() mounts=''
while [[ ${1:-} == -* ]]; do
  case $1 in
    --container-mounts=*) mounts=${1#*=} ;;
    --container-name=*)
      name=${1#*=}
      mkdir "$UNPACKED/pyxis_$name" 2>/dev/null && echo "$name" >>"$UNPACKED/names"
      ;;
    --container-*) ;;
    *) options+=("$1") ;;
  esac
  shift
done
[ -n "$mounts" ] || exec SRUN "${options[@]}" "$@"
exec SRUN "${options[@]}" unshare --mount bash -c '
  IFS=,
  for mount in $0; do mount --bind "${mount%%:*}" "${mount#*:}" || exit 1; done
  exec "$@"' "$mounts" "$@"
"""


ENROOT = """#!/bin/bash
[ "$1 $2" = "remove --force" ] && rmdir "$UNPACKED/$3"
"""


def test_a_run_whose_directory_only_the_container_has(cluster, tmp_path):
    """It is stopped, queued again and finished; the run's own words decide each verdict."""
    names = ("outside", "inside", "tools", "unpacked")
    outside, inside, tools, unpacked = (tmp_path / name for name in names)
    for directory in (outside, inside, tools, unpacked):
        directory.mkdir()
    real = shutil.which("srun", path=cluster.env["PATH"])
    (tools / "srun").write_text(PYXIS.replace("SRUN", real))
    (tools / "srun").chmod(stat.S_IRWXU)
    (tools / "enroot").write_text(ENROOT)
    (tools / "enroot").chmod(stat.S_IRWXU)
    run = Run(cluster, outside, "contained")
    steps = 8
    job = run.submit(
        f"train.steps={steps}",
        f"run.directory={inside}",
        settings={
            "CONTAINER_IMAGE": "/images/opd.sqsh",
            "CONTAINER_MOUNTS": f"{Path.cwd()}:{Path.cwd()},{outside}:{inside}",
            "LOG_DIR": str(run.logs),
            "UNPACKED": str(unpacked),
            "PATH": f"{tools}:{Path(sys.executable).parent}:{cluster.env['PATH']}",
        },
    )
    run.until_step(2)
    cluster.call("scancel", "--batch", "--signal=USR1", job)
    cluster.wait(job, {"COMPLETED"}, PATIENCE_SECONDS)
    first, second = run.verdicts()
    assert (first["verdict"], first["queued_again"]) == ("stopped", True)
    assert "stopped after a step, checkpoint" in first["reason"]
    assert second["verdict"] == "done"
    assert [row["step"] for row in run.rows()] == list(range(1, steps + 1))
    containers = [f"stable_opd_{job}_{attempt}" for attempt in (0, 1)]
    assert (unpacked / "names").read_text().split() == containers  # each once
    assert [file.name for file in unpacked.iterdir()] == ["names"]  # and removed
    assert not any(inside.iterdir())  # outside the container the run is elsewhere
