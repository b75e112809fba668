"""`stable-opd` with other values of the package's constants, for faults that would take long.

python -m tests.integration.with_constants train CONFIG stable_opd_mcore.serving.timeouts.START=4
"""

import json
import sys
from importlib import import_module

from stable_opd_mcore.cli import main


def run_with_constants(arguments: list[str]) -> None:
    constants = [each for each in arguments if each.startswith("stable_opd_mcore.")]
    for constant in constants:
        path, _, value = constant.partition("=")
        module, _, name = path.rpartition(".")
        setattr(import_module(module), name, json.loads(value))
    sys.argv = ["stable-opd", *(each for each in arguments if each not in constants)]
    main()


if __name__ == "__main__":
    run_with_constants(sys.argv[1:])
