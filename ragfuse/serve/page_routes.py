"""The web page at `/` and the API page at `/docs`: files of this package, which hold no data and
need no key.

Everything that they show comes from the other routes, which need the key where the server has keys.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

from fastapi import APIRouter
from fastapi.responses import FileResponse

from ragfuse.serve.refusals import APIError

FOLDER = Path(__file__).parent / "page"
HEADERS = MappingProxyType(
    {
        "content-security-policy": (
            "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
)
"""Headers of each file: only files and routes of this server, no inline script, no frame around the
page.
"""


def page_routes() -> APIRouter:
    """Return the routes of both pages and of their files."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def page() -> FileResponse:
        """Show the page to try ragfuse on."""
        return _file("index.html")

    @routes.get("/docs")
    async def api_page() -> FileResponse:
        """Show all routes with their fields."""
        return _file("docs.html")

    @routes.get("/page/{name}")
    async def page_file(name: str) -> FileResponse:
        """Return a file of the pages."""
        return _file(name)

    return routes


def _file(name: str) -> FileResponse:
    if not (FOLDER / name).is_file():
        raise APIError(404, f"The page has no file '{name:.80}'.", "http")
    return FileResponse(FOLDER / name, headers=HEADERS)
