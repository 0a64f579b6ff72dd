"""Parse and validate request bodies on a separate thread, so that a long one delays no other request."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError


class ParsedRequest(Request):
    """A request whose body is already parsed and validated; FastAPI gets the result from `json`."""

    def __init__(self, request: Request, value: BaseModel) -> None:
        super().__init__(request.scope, request.receive)
        self._value = value

    async def body(self) -> bytes:
        """Return a placeholder, so that FastAPI asks for `json`; the original bytes are freed."""
        return b"{}"

    async def json(self) -> Any:
        """Return the validated body."""
        return self._value


class BodyRoute(APIRoute):
    """A route whose body is parsed on the intake thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler that reads the body first, then calls FastAPI's own handler."""
        handler = super().get_route_handler()
        model = next((each.field_info.annotation for each in self.dependant.body_params), None)
        if model is None:
            return handler

        async def read_first(request: Request) -> Response:
            threads, raw = request.app.state.threads, await request.body()
            try:
                body = await threads.run(threads.intake, model.model_validate_json, raw)
            except ValidationError as error:
                raise RequestValidationError(error.errors(include_url=False)) from None
            return await handler(ParsedRequest(request, body))

        return read_first
