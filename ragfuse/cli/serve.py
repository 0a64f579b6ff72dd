"""`ragfuse serve`: an HTTP server with OpenAI's API, over one model and one store."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.cli.options import ENGINE, Ray, RayCPUs, option, prepare_model, screen
from ragfuse.cli.show import say
from ragfuse.settings import Settings


@screen(*ENGINE, "tiers", "policy", "ratio", "served_model_name", "api_keys")
def serve(
    console: Console,
    settings: Settings,
    host: Annotated[
        str,
        typer.Option(help="Address to listen on; any except loopback needs an API key."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)
    ] = 8000,
    api_keys_file: Annotated[
        Path | None, option("--api-keys-file", "File with accepted keys, one per line.", "none")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option(
            "--allow-origin", "Allow web pages of this origin (CORS); repeat for several.", "none"
        ),
    ] = None,
    ray: Ray = None,
    replicas: Annotated[
        str,
        option(
            "--replicas",
            "With --ray: number of replicas, or MIN:MAX to scale with the length of their queues.",
        ),
    ] = "1",
    ray_cpus: RayCPUs = None,
) -> None:
    """Serve OpenAI's API until SIGTERM or Ctrl-C, then finish answers and writes."""
    from ragfuse.serve.listener import bound

    if ray is None:
        bound(host, port).close()
    settings = settings.usable()
    import fastapi  # noqa: F401 - fails early if missing
    import uvicorn  # noqa: F401

    from ragfuse.serve.keys import Keys, check_host, read_keys

    accepted = [*settings.api_keys, *(read_keys(api_keys_file) if api_keys_file else ())]
    keys = Keys(accepted, settings.salt)
    check_host(host, keys)
    if ray is not None:
        from ragfuse.ray.application import ReplicaOptions
        from ragfuse.ray.cluster import check_cluster

        options = ReplicaOptions.parse(replicas, ray_cpus)
        check_cluster(settings)
    # logs one line per answer with its reuse
    logging.getLogger("ragfuse").setLevel(logging.INFO)
    prepare_model(settings)
    console = Console(stderr=True)

    def announce(url: str) -> None:
        status.stop()
        name = next(iter(settings.served_model_name), Path(settings.model).name)
        say(console, f"{name} answers at {url} (Ctrl-C stops the server).")
        say(console, f"Chat page: {url.removesuffix('/v1')}/")

    with console.status("loading the model") as status:
        if ray is not None:
            from ragfuse.ray.application import serve as run_on_ray

            run_on_ray(
                settings,
                accepted,
                host,
                port,
                allow_origin or (),
                options,
                ray,
                announce,
                partial(_say, console),
            )
            return
        from ragfuse.serve.server import serve as run
        from ragfuse.serve.service import Service

        run(
            Service(settings, keys),
            host,
            port,
            allow_origin or (),
            announce,
            partial(_say, console),
        )


def _say(console: Console, line: str) -> None:
    """Print a line while the server stops. A closed terminal must not prevent the saving of KV."""
    # rich exits the program on a broken pipe
    with contextlib.suppress(OSError, ValueError, SystemExit):
        say(console, line)
