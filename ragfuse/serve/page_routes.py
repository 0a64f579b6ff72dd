"""The web page at `/` and the API page at `/docs`: files of this package, which hold no data and need no key.

Everything that they show comes from the other routes, which need the key where the server has keys.
"""

from __future__ import annotations

from importlib.resources import files
from types import MappingProxyType

from fastapi import APIRouter
from fastapi.responses import Response

from ragfuse.serve.refusals import APIError

MEDIA_TYPES = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)
"""Media types of the page's files, by suffix."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The content security policy: only files and routes of this server, no inline script, no frame around the page."""
HEADERS = MappingProxyType(
    {
        "content-security-policy": POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)
"""Headers of each file."""


def page_routes() -> APIRouter:
    """Return the routes of both pages and of their files, which are read once."""
    folder = files("ragfuse.serve") / "page"
    contents = {
        each.name: each.read_bytes()
        for each in folder.iterdir()
        if _suffix(each.name) in MEDIA_TYPES and each.is_file()
    }
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> Response:
        """Show the page to try ragfuse on."""
        return _file(contents, "index.html")

    @routes.get("/docs")
    async def api_page() -> Response:
        """Show all routes with their fields."""
        return _file(contents, "docs.html")

    @routes.get("/page/{name}")
    async def page_file(name: str) -> Response:
        """Return a file of the pages."""
        return _file(contents, name)

    return routes


def _file(contents: dict[str, bytes], name: str) -> Response:
    if name not in contents:
        raise APIError(404, f"The page has no file '{name:.80}'.", "http")
    return Response(contents[name], headers=dict(HEADERS), media_type=MEDIA_TYPES[_suffix(name)])


def _suffix(name: str) -> str:
    return name[name.rfind(".") :]
