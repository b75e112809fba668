"""The tokens that an episode's contexts share, against the tree that they are."""

import numpy as np

from stable_opd_mcore.rollout.agent_account import num_repeated


def test_a_token_is_repeated_if_it_adds_no_node_to_the_tree():
    rng = np.random.default_rng(0)
    for _ in range(200):
        contexts = [rng.integers(0, 300, 2)]
        for _ in range(rng.integers(0, 8)):  # forks of any length, of others or of nothing
            of = contexts[rng.integers(len(contexts))]
            own = rng.choice([1, 255, 256, 2**31 - 1], rng.integers(0, 5))
            contexts.append(np.concatenate([of[: rng.integers(len(of) + 1)], own]))
        nodes = {tuple(ids[: end + 1]) for ids in contexts for end in range(len(ids))}
        found = num_repeated([ids.astype(np.int32) for ids in contexts])
        assert found == sum(map(len, contexts)) - len(nodes)
