"""Rollouts from SGLang servers. Read in this order:

build            from a config to the engine and its servers
sglang_engine    the `RolloutEngine`: sampling, publishing, and agreement between ranks
dispatch         one rank's requests: queue, retries, pauses
prompt_requests  the requests for one prompt's responses
fleet            one rank's servers: states, failures, restarts
publisher        one publish: the weights to all servers, again to those that they did not reach
sync             one push: send the weights, verify them, stamp the version
transports       what all transfers of weights share, and the transfers by shared memory and files
group            the transfer over a process group of trainer and servers
checksums        what the servers' weights must hash to
server_values    what a server holds where a checksum differs
event_log        the log of what happened to the servers
serve            `stable-opd serve`: servers without a trainer
"""
