"""For how long a server may take, in seconds, where no setting of rollout.sglang says so.

Of a whole request, unless a line says otherwise. Not here: pauses between attempts (client.py).
"""

START = 1800.0  # until a server answers; where its caches are empty it compiles kernels
CONNECT = 10.0  # until a server has taken a connection
SILENCE = 30  # until a machine whose kernel sends no TCP packets counts as unreachable
PROBE = 15.0  # a health probe, for which SGLang draws one token: a second
QUESTION = 60.0  # what needs no pass over the weights: a flushed cache, the release, a version
UPDATE = 120.0  # one that moves memory: the begin and end of an update, releasing and resuming
CHECKSUMS = 600.0  # one hash per parameter
