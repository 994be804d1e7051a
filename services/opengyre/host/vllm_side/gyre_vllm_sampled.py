"""What vLLM's server has sampled of each call, told over HTTP (`--middleware`). Runs in vLLM's own environment.

Where tokens are sent several at a time (`stream_interval`), a client does not know how many there were when weights
changed, and vLLM says it only when a call has ended.
"""

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

PATH = "/gyre/sampled"
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class Sampled:
    """Answers `PATH` with an object, the call's identifier -> its tokens so far; passes everything else on."""

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]]) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self.app(scope, receive, send)
            return
        states = scope["app"].state.engine_client.output_processor.request_states.values()
        said = {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(said).encode()})
