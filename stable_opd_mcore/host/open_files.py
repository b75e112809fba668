"""The limit of open files of this process; every connection is one."""

import resource

from stable_opd_mcore.errors import UserError


def require_open_files(number: int, what: str) -> None:
    """Let this process open `number` files: raises its soft limit where that is lower.

    Args:
        what: needs them, in the plural.

    Raises:
        UserError: the hard limit, which a process cannot raise, is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= number:
        return
    if hard != resource.RLIM_INFINITY and hard < number:
        raise UserError(
            f"{what} need up to {number} open files, and this process has a hard limit of {hard} "
            "(ulimit -Hn): raise it where the job starts (limits.conf, LimitNOFILE of a service, "
            "--ulimit nofile of a container), or give each data-parallel rank fewer servers"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
