"""The responses of one evaluation, on disk: parts of a fixed number of problems.

A part is written whole when all of its responses are graded. An evaluation that was killed
continues after its last part. The parts do not depend on the number of ranks, so the files are the
same however often it was killed.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stable_opd_mcore.data.rollout_files import read_rollouts
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import write_atomically
from stable_opd_mcore.host.json_files import read_json_object
from stable_opd_mcore.records import Rollout

IDENTITY = "identity.json"


class ResponseStore:
    """One directory of parts. One process at a time may use it.

    The identity holds plain values of everything that decides the responses: weights, sampling,
    problems.
    """

    def __init__(self, directory: Path, identity: Mapping[str, Any]):
        self._directory = directory
        self._identity = dict(identity)

    def open(self) -> int:
        """Create the directory if it does not exist; return how many parts it holds.

        Raises:
            UserError: the directory holds responses of another identity.
        """
        path = self._directory / IDENTITY
        wanted = json.dumps(self._identity, indent=1, sort_keys=True)
        if not path.is_file():
            write_atomically(path, wanted.encode())
        earlier = read_json_object(path)
        for name, value in json.loads(wanted).items():
            if earlier.get(name) != value:
                raise UserError(
                    f"{self._directory}: its responses have {name} {earlier.get(name)!r}, this "
                    f"evaluation {value!r}; give run.name=NAME for the new results, or remove "
                    "that directory"
                )
        number = 0
        while self.path(number).is_file():
            number += 1
        return number

    def rollouts(self) -> Iterator[Rollout]:
        """All responses in the order of the problems, one part in memory at a time."""
        for part in sorted(self._directory.glob("part_*.jsonl")):
            yield from read_rollouts(part)

    def path(self, number: int) -> Path:
        """The file of a part; it must be written atomically."""
        return self._directory / f"part_{number:05d}.jsonl"
