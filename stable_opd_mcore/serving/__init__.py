"""SGLang servers as this project sees them: a process to supervise and an address to talk to.

Not here: what is asked of a server (rollout/sglang/ and scoring/served_teacher.py). Only the
programs in sglang_cpu_stand_in/ import SGLang; they run in the servers' own environment.
"""
