"""Several leaders' views of one server."""

from stable_opd_mcore.rollout.sglang.status import ServerStatus, one_per_server


def status(name: str, state: str, life: int = 0, sender: int | None = 0) -> ServerStatus:
    return ServerStatus(name, f"http://{name}", "key", state, 1, life, sender)


def test_a_shared_server_is_sent_the_weights_once_if_any_leader_saw_that_it_lacks_them():
    seen = [status("a", "ready"), status("b", "ready"), status("a", "needs_weights", life=2)]
    assert one_per_server(seen) == [status("a", "needs_weights", life=2), status("b", "ready")]


def test_every_failure_that_a_leader_sees_changes_the_life():
    lives = ((0, 0), (1, 0), (1, 1))
    found = {
        one_per_server([status("a", "ready", first), status("a", "ready", second)])[0].life
        for first, second in lives
    }
    assert len(found) == len(lives)


def test_the_leader_that_started_a_server_sends():
    seen = [status("a", "ready", sender=None), status("a", "ready", sender=3)]
    assert [each.sender for each in one_per_server(seen)] == [3]
    assert one_per_server(seen[:1])[0].sender is None
