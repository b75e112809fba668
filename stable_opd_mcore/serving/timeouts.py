"""How long a server may take, in seconds.

A limit is for a whole request, unless a line says otherwise.
"""

START = 1800.0  # until a server answers; where its caches are empty it compiles kernels
REQUEST = 1800.0  # a response, and whatever no other line names
SCORE = 600.0  # a sequence's scores, by one replica of a teacher; then the next one is asked
TEACHER_PATIENCE = 600.0  # a teacher whose replicas do not answer is asked again for this long
BUCKET = 600.0  # one bucket of weights; also until the process group of a publish has formed
HEALTH_INTERVAL = 10.0  # between two health probes, each of which may take as long
CONNECT = 10.0  # until a server has taken a connection
SILENCE = 30  # until a machine whose kernel sends no TCP packets counts as unreachable
PROBE = 15.0  # a health probe, for which SGLang samples one token: a second
QUESTION = 60.0  # what needs no pass over the weights: a flushed cache, the release, a version
UPDATE = 120.0  # one that moves memory: the begin and end of an update, releasing and resuming
CHECKSUMS = 600.0  # one hash per parameter
