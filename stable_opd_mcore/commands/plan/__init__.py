"""What a run will need, computed from its config: memory per GPU, places of servers, rough seconds.

Reads model directories' config.json and nothing else.
"""
