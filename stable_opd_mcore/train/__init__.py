"""Training: step.py is the page to read first."""

from stable_opd_mcore.parallel import megatron_cpu

megatron_cpu.install()  # before any module here imports megatron
