"""What a run will need, computed from its config alone: memory per GPU, and seconds a step.

Reads model directories' config.json and nothing else. Not here: measurements (benchmarks/).
"""
