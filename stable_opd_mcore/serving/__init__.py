"""SGLang servers: the process (process.py), the HTTP client (client.py), the key (api_key.py), a
teacher on them (teacher.py).

Only launch_server.py imports SGLang; it runs in the servers' own environment.
"""
