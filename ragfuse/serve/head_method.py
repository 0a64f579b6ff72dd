"""HEAD, which monitors and load balancers send: answered as GET is, without the body."""

from __future__ import annotations

from ragfuse.serve.allowed_methods import AllowedMethods
from ragfuse.serve.guard import App, Message, Receive, Scope, Send


class HeadMethod:
    """ASGI middleware that lets the app answer a HEAD as a GET, and drops the body.

    Args:
        app: The app, whose routes know GET.
        methods: The methods of its paths.
    """

    def __init__(self, app: App, methods: AllowedMethods) -> None:
        self._app, self._methods = app, methods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; all but a HEAD at a path that has it are passed on."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or "HEAD" not in self._methods.at(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, without_body)
