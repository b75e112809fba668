"""`make gpu`: what a GPU machine must show, in ten minutes and without a network.

    python -m benchmarks.gpu                       # every part
    python -m benchmarks.gpu --parts kernels loss  # some of them
    python -m benchmarks.gpu --device cpu          # every part at a tiny size, without a GPU

Start reading at suite.py. Each file in parts/ is one part: it measures figures, compares errors
with limits, and runs in a process of its own. docs/evidence/gpu.md says what is measured.
"""
