"""The routes of health and metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ragfuse.serve.request_state import tenant_of
from ragfuse.serve.service import Service


def health_routes(service: Service) -> APIRouter:
    """Return the routes of health and metrics."""
    routes = APIRouter()

    @routes.get("/health")
    async def health() -> dict[str, str]:
        """Report that the server accepts requests; while it stops there is no connection."""
        return {"status": "ok", "model": service.model}

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Report Prometheus metrics of all requests and of the client's tenant."""
        salt = tenant_of(request).salt
        text = await service.threads.run(
            service.threads.control, lambda: service.metrics.text(salt)
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    return routes
