"""SGLang servers as this project sees them: a process to supervise and an HTTP address to talk to.

Not here: what is asked of a server (rollout/ draws and publishes weights, teacher/ scores).
SGLang itself is imported only by the programs in sglang_cpu/, which run inside the servers' own
venv.
"""
