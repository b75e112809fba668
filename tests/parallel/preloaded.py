"""What each rank of a run would import, read or compile anew; see launch.py."""

import megatron.core.dist_checkpointing.strategies.torch  # noqa: F401
import numpy.ma  # noqa: F401

import stable_opd_mcore.commands.train.train  # noqa: F401
from stable_opd_mcore.commands.check import finding
from stable_opd_mcore.commands.report import report

finding._texts()
report._template()
