"""Which session gets a request: it belongs to the URL of one episode.

Not here: HTTP (serving/), what becomes of a request (sessions.py).
"""

from collections import deque
from concurrent.futures import Future

from stable_opd_mcore.data.chat_api import (
    ChatReply,
    ChatRequest,
    RequestError,
    episode_over,
    unknown_episode,
)
from stable_opd_mcore.rollout.sessions import Session

_MAX_OVER = 10_000  # URLs of ended episodes that are still told from unknown ones


class Doorway:
    """Finds the session that a URL belongs to. The one of this process, `DOORWAY`, is safe to use
    from many threads."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}
        self._over: deque[str] = deque(maxlen=_MAX_OVER)

    def open(self, session: Session) -> None:
        self._sessions[session.secret] = session

    def close(self, session: Session) -> None:
        if self._sessions.pop(session.secret, None) is not None:
            self._over.append(session.secret)

    def call(self, secret: str, request: ChatRequest) -> Future[ChatReply]:
        """See `Agents` of serving/http_process.py."""
        reply = Future[ChatReply]()
        if (session := self._sessions.get(secret)) is not None:
            session.pool.post(session.called, request, reply)
        else:
            reply.set_exception(episode_over() if secret in self._over else unknown_episode())
        return reply

    def hung_up(self, secret: str, request: ChatRequest) -> None:
        if (session := self._sessions.get(secret)) is not None:
            session.pool.post(session.hung_up, request)

    def refused(self, secret: str, error: RequestError) -> None:
        if (session := self._sessions.get(secret)) is not None:
            session.pool.post(session.refused, error)


DOORWAY = Doorway()
