"""A config's real setup, step and publish on one rank of a world that does not exist.

A fake process group answers every collective and fake tensors have shapes only, so a rank of 1,024
takes seconds on one CPU. Group sizes, shapes and memory are real; numbers and speed are not.
"""
