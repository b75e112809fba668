"""Rollouts from SGLang servers. Read in this order:

build       from a config to the engine and its servers
engine      the `RolloutEngine`: drawing, publishing, and agreement between ranks
fleet       one rank's servers: requests in flight, failures, restarts
records     between the trainer's records and a server's requests
sync        one publish: send the weights, verify them, stamp the version
transports  what all transfers of weights share, and the transfer by shared memory and by files
group       the transfer over a process group of trainer and servers
checksums   what the servers' weights must hash to
event_log   the log of what happened to the servers
serve       `stable-opd serve`: servers without a trainer

Not here: HTTP requests and server processes (serving/).
"""
