"""The methods that a path has, over all routes: a router itself tells only those of the first route that it finds."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.routing import BaseRoute, Route


class AllowedMethods:
    """The methods of all paths. A path that is written out in a route is that route's, and no value of a parameter.

    Args:
        routes: All routes.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._routes = [route for route in routes if isinstance(route, Route)]

    def at(self, path: str) -> list[str]:
        """Return the methods of a path, sorted, HEAD where it has GET; [] for a path that no route has."""
        exact = [route for route in self._routes if route.path == path]
        routes = exact or [route for route in self._routes if route.path_regex.match(path)]
        found = {method for route in routes for method in route.methods or ()}
        return sorted(found | {"HEAD"} if "GET" in found else found)
