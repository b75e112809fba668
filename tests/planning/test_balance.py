"""Advice on lag and on the number of server nodes: it is what the same plan then predicts."""

from __future__ import annotations

from stable_opd_mcore.planning.balance import best_split, lag_advice, tokens_per_second, with_lag
from stable_opd_mcore.planning.hardware import Cluster
from stable_opd_mcore.planning.job import make_job
from tests.planning.cases import NODE, config_7b


def test_the_fastest_division_of_the_nodes_is_named_with_its_rate(tmp_path):
    config = config_7b(tmp_path)
    job = make_job(config, Cluster(7, 8, server_nodes=1))
    best = best_split(job)
    rates = {
        nodes: tokens_per_second(make_job(config, Cluster(nodes, 8, server_nodes=8 - nodes)))
        for nodes in range(1, 8)
    }
    lag = max(rates, key=lambda nodes: rates[nodes])
    assert (best.cluster.nodes, best.cluster.server_nodes) == (lag, 8 - lag)
    assert tokens_per_second(best) == rates[lag] > rates[7]
    lines = lag_advice(job)
    assert f"{lag} of the trainer and {8 - lag} of servers ({rates[lag]:,.0f} instead" in lines[1]
    assert len(lag_advice(best)) == 1  # nothing to change
    assert f"1 partial: {tokens_per_second(with_lag(job, 1, True)):,.0f}" in lines[0]
    on_policy, partial = (tokens_per_second(with_lag(job, *how)) for how in ((0, False), (4, True)))
    assert partial > 1.2 * on_policy


def test_without_servers_of_their_own_there_is_no_advice(tmp_path):
    assert lag_advice(make_job(config_7b(tmp_path, "rollout.engine=embedded"), NODE)) == []
