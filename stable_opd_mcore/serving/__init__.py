"""SGLang servers: the process (process.py), the HTTP client (client.py) and the key (api_key.py).

Not here: drawing rollouts (rollout/sglang/) and scoring (scoring/served_teacher.py). Only
launch_server.py imports SGLang; it runs in the servers' own environment.
"""
