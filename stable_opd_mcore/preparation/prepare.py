"""Makes training sets of a data set: check, filter in parallel, split, publish.

Everything that can be refused is refused before the first row is filtered. Finished parts stay in
`DIRECTORY/.prepare-NAME/` until all outputs are published, so the same command continues after a
kill and writes the same bytes.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stable_opd_mcore.errors import UserError
from stable_opd_mcore.host.atomic_files import describe_space
from stable_opd_mcore.host.run_lock import RunLock
from stable_opd_mcore.preparation.job import Request, check, digest, facts_of
from stable_opd_mcore.preparation.publish import is_published, publish
from stable_opd_mcore.preparation.spool import run_parts


def prepare_data(request: Request, tell: Callable[[str], None]) -> None:
    """Write the outputs of a recipe, the benchmarks, the dropped rows, manifest and datasheet.

    Args:
        tell: gets a line of progress or result at a time.

    Raises:
        UserError: an option that does not fit, a source or benchmark that cannot be read, too few
            rows, a full disk, another preparation at work in the same place.
    """
    job = check(request)
    tell(f"{job.name}: {len(job.files)} files, {sum(part.num_rows for part in job.parts):,} rows")
    facts = facts_of(job)
    with _naming_full_disk(request.directory), RunLock(job.spool):
        if is_published(job, facts):
            tell(f"{job.manifest}: made by this command before, and its files are intact")
        else:
            folder = job.spool / digest(facts["filter"])
            for other in job.spool.iterdir():
                if other.is_dir() and other != folder:
                    shutil.rmtree(other)
            folder.mkdir(exist_ok=True)
            run_parts(job.parts, job.columns, job.rules, folder, request.num_processes, tell)
            publish(job, facts, folder, tell)
        shutil.rmtree(job.spool)


@contextmanager
def _naming_full_disk(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{directory}: the disk is full ({describe_space(directory, 0)}); make room and start "
            "the same command again, it continues"
        ) from error
