"""The URL of an agent, with scripted answers, in a thread of this process."""

import asyncio
import contextlib
import threading

from stable_opd_mcore.serving.endpoint import app, listen, serve


@contextlib.contextmanager
def agent_url(answer, secret="secret", **options):
    """Yields base_url; `answer` as in `app`."""
    listening = listen("127.0.0.1")
    port, loop = listening.getsockname()[1], asyncio.new_event_loop()
    work = loop.create_task(serve(app(answer, **options), listening))

    def run():
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(work)
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/{secret}/v1"
    finally:
        loop.call_soon_threadsafe(work.cancel)
        thread.join(10)
        assert not thread.is_alive()
