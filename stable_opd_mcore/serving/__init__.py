"""SGLang servers: the process (process.py), the HTTP client (client.py) and the key (api_key.py).

Not here: drawing rollouts (rollout/sglang/) and scoring (scoring/served_teacher.py). Only the
programs in sglang_cpu_stand_in/ import SGLang; they run in the servers' own environment.
"""
