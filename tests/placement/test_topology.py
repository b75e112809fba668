"""Every world of the shipped scripts, refusals with numbers, shares of the prompts."""

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
from typer.testing import CliRunner

from stable_opd_mcore.cli import app
from stable_opd_mcore.commands.plan.planned_run import read_models
from stable_opd_mcore.commands.plan.topology_text import places
from stable_opd_mcore.config.load import load_config
from stable_opd_mcore.config.schema import Config
from stable_opd_mcore.errors import UserError
from stable_opd_mcore.models.description.architecture import Architecture
from stable_opd_mcore.placement.hardware import Cluster
from stable_opd_mcore.placement.layout import Layout
from stable_opd_mcore.placement.topology import (
    Topology,
    derive_topology,
    machine_servers,
    ranks_of_servers,
    replica_gpus,
)
from tests.commands.plan.cases import CONFIGS, QWEN_7B
from tests.models import tiny

H200 = 139.0


@cache
def settings_and_student(name: str, *overrides: str) -> tuple[Config, Architecture]:
    config = load_config(CONFIGS / f"stable_opd_{name}.yaml", overrides)
    return config, read_models(config).student


def topology(
    name: str,
    nodes: int,
    server_nodes: int = 0,
    gpus: int = 8,
    *overrides: str,
    memory_gib: float | None = H200,
    spare_gpus: int = 0,
) -> Topology:
    config, student = settings_and_student(name, *overrides)
    cluster = Cluster(nodes, gpus, server_nodes, spare_gpus)
    return derive_topology(config, student, cluster, memory_gib)


def check_places(made: Topology) -> None:
    """All GPUs have a server, none has two, every rank is served, and all servers do equal work."""
    held = Counter((server.node, gpu) for server in made.servers for gpu in server.gpus)
    nodes = range(made.nodes + made.server_nodes)
    with_servers = nodes[made.nodes :] if made.server_nodes else nodes
    assert held == Counter(
        (node, gpu) for node in with_servers for gpu in range(8)[: made.gpus_per_node]
    )
    assert [server.number for server in made.servers] == list(range(len(made.servers)))
    check_shares([server.data_ranks for server in made.servers], made.layout.gradient_ranks)
    if made.placement == "colocated":
        for server in made.servers:
            (rank,) = server.data_ranks
            places = replica_gpus(made.layout, made.gpus_per_node, rank)
            assert {(server.node, gpu) for gpu in server.gpus} <= set(places)
            assert server.node == places[0][0]


def check_shares(shares: Sequence[tuple[int, ...]], ranks: int) -> None:
    num_servers = Counter(rank for share in shares for rank in share)
    assert sorted(num_servers) == list(range(ranks))
    work = [sum(1 / num_servers[rank] for rank in share) for share in shares]
    assert max(work) - min(work) < 1e-9


def table_row(name: str, nodes: int, server_nodes: int, gpus: int, made: Topology) -> str:
    """The row of docs/evidence/topology.md."""

    def count(number: int, noun: str) -> str:
        return f"{number} {noun}" + "s" * (number > 1)

    world = f"{nodes} + {server_nodes}" if server_nodes else str(nodes)
    world += f", of {gpus} GPUs" if gpus != 8 else ""
    replica = made.layout.tensor * made.layout.pipeline
    ranks = f"{made.layout.gradient_ranks} of {count(replica, 'GPU')}"
    servers = f"{len(made.servers)} of {count(made.tensor, 'GPU')}"
    servers += "" if server_nodes else ", colocated"
    share = count(len(made.servers_of(0)), "server")
    sharing = len(made.servers[0].data_ranks)
    share += f", shared by {sharing} ranks" if sharing > 1 else ""
    return f"| `stable_opd_{name}.sh` | {world} | {ranks} | {servers} | {share} |\n"


# script, trainer nodes, server nodes, GPUs a node: the table of docs/evidence/topology.md.
ROWS = [
    *(("1p5b", 1, 0, 8), ("1p5b", 2, 0, 8)),
    *(("7b", 1, 0, 8), ("7b", 1, 0, 4), ("7b", 2, 1, 8), ("7b", 4, 1, 8), ("7b", 8, 1, 8)),
    *(("32b", 2, 0, 8), ("32b", 4, 0, 8), ("32b", 4, 2, 8)),
    *(("8b_235b", 2, 0, 8), ("8b_235b", 2, 1, 8), ("8b_235b", 12, 2, 8)),
    *(("30b_a3b", 2, 0, 8), ("30b_a3b", 2, 1, 8), ("30b_a3b", 8, 2, 8)),
]


def test_who_sits_where():
    page = (CONFIGS.parent / "docs" / "evidence" / "topology.md").read_text()
    for world in ROWS:
        made = topology(*world)
        check_places(made)
        assert table_row(*world, made) in page


def test_worlds_up_to_128_nodes_are_valid():
    for nodes in (*range(1, 9), 12, 16, 63, 64, 127, 128):
        for name in ("1p5b", "7b"):
            check_places(topology(name, nodes))
            check_places(topology(name, nodes, max(1, nodes // 3)))
        check_places(topology("32b", 2 * nodes, nodes))


def test_gpus_are_counted_on_their_own_node():
    made = topology("7b", 2, 2)
    assert [server.gpus for server in made.servers if server.node == 3] == [(n,) for n in range(8)]
    assert replica_gpus(Layout(32, tensor=4, pipeline=2), 8, 3) == (
        *((1, gpu) for gpu in range(4, 8)),
        *((3, gpu) for gpu in range(4, 8)),
    )


def test_servers_on_the_trainers_machine_follow_its_gpus():
    settings = ("rollout.sglang.placement=disaggregated",)
    made = topology("7b", 1, 0, 4, *settings, spare_gpus=4)
    assert [server.gpus for server in made.servers] == [(4,), (5,), (6,), (7,)]


NUMBER, TENSOR = "rollout.sglang.num_servers", "rollout.sglang.tensor"
UNCUT = ("parallel.tensor=1", "parallel.sequence=false")
# Message: the arguments of a topology that it refuses, then those that follow each remedy
ALONE = ("7b", 1, 0, 8)
REFUSED = {
    r"= 4 does not divide 6 trainer GPUs": [(("7b", 1, 0, 6),), (ALONE,)],
    r"1 server of 1 GPU on the 8 GPUs .*: 7 would be idle\. Set both to null, .* is 8": [
        (ALONE, (f"{NUMBER}=1", f"{TENSOR}=1")),
        (ALONE,),
        (ALONE, (f"{NUMBER}=2", f"{TENSOR}=4")),
    ],
    r"16 servers of 1 GPU on the 8 GPUs .*: 8 too many": [
        (("7b", 2, 1, 8), (f"{NUMBER}=16", f"{TENSOR}=1")),
        (("7b", 2, 1, 8), (f"{NUMBER}=8", f"{TENSOR}=1")),
    ],
    r"tensor=8 does not divide the student's num_attention_heads=28": [
        (("7b", 2, 1, 8), (f"{TENSOR}=8",)),
        (("7b", 2, 1, 8), (f"{TENSOR}=4",)),
        (("7b", 2, 1, 8),),
    ],
    r"servers of 2 GPUs leave 16 of 32 GPUs without .*SERVER_NODES.* parallel.pipeline": [
        (("32b", 4, 0, 8), ("parallel.pipeline=2", f"{TENSOR}=2")),
        (("32b", 4, 2, 8), ("parallel.pipeline=2", f"{TENSOR}=2")),
        (("32b", 4, 0, 8), ("parallel.pipeline=1", f"{TENSOR}=2")),
    ],
    r"bfloat16 weights take 61\.0 GiB, .* on 8 GPUs, has 40\.0 GiB for them: .*SERVER_NODES": [
        (("32b", 2, 0, 8), (), {"memory_gib": 20.0}),
        (("32b", 2, 1, 8), (), {"memory_gib": 20.0}),
        (("32b", 2, 0, 8), (), {"memory_gib": 80.0}),
        (("32b", 2, 0, 8), (f"{TENSOR}=8",), {"memory_gib": 20.0}),
    ],
    r"external server, on 8 GPUs, has 34\.0 GiB for them: use GPUs with more memory, or, with": [
        (("32b", 2, 1, 8), (), {"memory_gib": 10.0}),
        (("32b", 2, 1, 8), (), {"memory_gib": 20.0}),
        (("32b", 2, 1, 8), (f"{TENSOR}=8",), {"memory_gib": 10.0}),
    ],
    r"all 8 GPUs of the machine train, .*SERVER_NODES": [
        (ALONE, ("rollout.sglang.placement=disaggregated",)),
        (("7b", 1, 0, 4), ("rollout.sglang.placement=disaggregated",), {"spare_gpus": 4}),
        (ALONE, ("rollout.sglang.placement=colocated",)),
        (("7b", 1, 1, 8), ("rollout.sglang.placement=disaggregated",)),
    ],
    r"servers of 2 GPUs leave 8 of 8 GPUs without a server": [
        (ALONE, (*UNCUT, f"{NUMBER}=4")),
        (("7b", 1, 1, 8), (*UNCUT, f"{NUMBER}=4")),
        (ALONE, (*UNCUT, f"{TENSOR}=1")),
    ],
    r"1 colocated server for 2 data-parallel ranks": [
        (ALONE, (f"{NUMBER}=1",), {"memory_gib": None}),
        (ALONE, (), {"memory_gib": None}),
    ],
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused_with_the_sum_until_the_remedy(message):
    def place(world, overrides=(), others=None):
        return topology(*world, *overrides, **(others or {}))

    refused, *remedies = REFUSED[message]
    with pytest.raises(UserError, match=message):
        place(*refused)
    for remedy in remedies:
        place(*remedy)


def test_servers_of_a_teacher_may_have_more_ranks_than_key_value_heads():
    """SGLang gives several ranks the same heads; a publish to a student's servers cannot."""
    config = load_config(CONFIGS / "smoke_cpu.yaml", [f"{TENSOR}=4"])
    model = tiny.architecture("qwen3_moe")
    assert (model.num_attention_heads, model.num_key_value_heads) == (4, 2)
    arguments = (config, model, 4, 80.0, "disaggregated")
    assert machine_servers(*arguments, role="teacher") == (1, 4)
    with pytest.raises(UserError, match="does not divide the student's num_key_value_heads=2"):
        machine_servers(*arguments)


def test_windows_that_servers_read_over_are_refused_until_no_position_leaves_them():
    config = load_config(CONFIGS / "stable_opd_7b.yaml")
    fields = tiny.config("mistral", sliding_window=50)
    cluster = Cluster(2, 8, 0, 0)
    with pytest.raises(UserError, match=r"student's sliding window of 50 .*student\.window=50 "):
        derive_topology(config, tiny.read_architecture(fields), cluster, None)
    derive_topology(config, tiny.read_architecture(fields, window=50), cluster, None)
    arguments = (config, tiny.read_architecture(fields), 8, None, "external")
    with pytest.raises(UserError, match=r"max_position_embeddings=50 in config\.json of the serv"):
        machine_servers(*arguments, role="teacher")


def test_places_name_the_gpus_of_ranks_and_servers_on_every_node():
    assert places(topology("7b", 1, 0), ["n1"]) == [
        "n1: data rank 0 on GPUs 0 1 2 3; data rank 1 on GPUs 4 5 6 7; "
        "server_0 on GPUs 0 1 2 3 for data rank 0; server_1 on GPUs 4 5 6 7 for data rank 1"
    ]
    over_nodes = places(topology("32b", 2, 1, 8, "parallel.pipeline=2"))
    every = "data rank 0 on GPUs 0 1 2 3 4 5 6 7"
    assert over_nodes[:2] == [f"node 0: {every}", f"node 1: {every}"]
    assert over_nodes[2].startswith(
        "node 2: server_0 on GPUs 0 1 for data rank 0; server_1 on GPUs 2 3 for data rank 0"
    )
    with pytest.raises(UserError, match="--hosts names 1 node, but the run has 2"):
        places(topology("7b", 2, 0), ["n1"])


def test_a_cpu_has_no_idle_gpus():
    settings = ("rollout.sglang.num_servers=3", "rollout.sglang.tensor=2")
    made = topology("7b", 2, 1, 4, *settings, memory_gib=None)
    assert len(made.servers) == 3
    assert made.servers_of(0) == made.servers_of(1) == made.servers


def test_servers_do_equal_work_at_any_two_numbers():
    for servers, ranks in product(range(1, 25), repeat=2):
        check_shares(ranks_of_servers(servers, ranks), ranks)


def test_external_servers_are_shared_without_places():
    urls = "rollout.sglang.urls=[http://a:1,http://b:1]"
    made = topology("7b", 2, 0, 8, "rollout.sglang.placement=external", urls)
    assert [server.data_ranks for server in made.servers] == [(0, 1), (2, 3)]


def test_the_command_prints_lines_and_assignments(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    arguments = ["topology", str(CONFIGS / "stable_opd_7b.yaml"), f"student.path={tmp_path}"]
    arguments += ["--nodes=2", "--server-nodes=1"]

    def printed(*options: str) -> str:
        answer = CliRunner().invoke(app, [*arguments, *options])
        assert answer.exit_code == 0
        return answer.stdout

    lines = printed()
    assert "2 nodes x 8 GPUs, TP4 x PP1 x CP1 x DP4" in lines
    assert "8 of tensor 1 on 1 node of their own, 8 a node; 2 for each of 4 data-parallel" in lines
    assert "\nnode 1: data rank 2 on GPUs 0 1 2 3; data rank 3 on GPUs 4 5 6 7\n" in lines
    assert (
        "\nnode 2: server_0 on GPUs 0 for data rank 0; server_1 on GPUs 1 for data rank 0; "
        in lines
    )
    assert "\nn7: data rank 0 on GPUs 0 1 2 3;" in printed("--hosts=n7,n8,n9")
    shell = printed("--shell")
    assert [line for line in shell.splitlines() if not line.startswith("# ")] == [
        "SERVERS_PER_NODE=8",
        "SERVER_TENSOR=1",
    ]
    assert "1 of tensor 1" in printed(
        "--gpu=cpu", "--gpus-per-node=4", "rollout.sglang.num_servers=1"
    )
