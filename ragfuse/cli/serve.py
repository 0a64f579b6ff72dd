"""`ragfuse serve`: an HTTP server with OpenAI's API, over one model and one store."""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ragfuse.cli.options import (
    Device,
    Dtype,
    Model,
    ModelKwargs,
    Overflow,
    Policy,
    Ratio,
    Ray,
    RayCPUs,
    default_of,
    option,
    prepare_model,
    settings_of,
)
from ragfuse.errors import InputError


def serve(
    model: Model = None,
    dtype: Dtype = None,
    device: Device = None,
    model_kwargs: ModelKwargs = None,
    store: Annotated[
        list[str] | None,
        option(
            "--store",
            "Folder of the KV store, or URL of a further tier; repeat for several.",
            default_of("store", "store in RAGFUSE_HOME"),
        ),
    ] = None,
    policy: Policy = None,
    ratio: Ratio = None,
    overflow: Overflow = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; any but a loopback address needs an API key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        option(
            "--api-key",
            "An accepted key: KEY is a tenant of its own, SALT:KEY the one of that salt, :KEY the one without a salt, "
            "as of `ragfuse ingest`; repeat for several.",
            default_of("api_keys", "none"),
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None, option("--api-keys-file", "File with accepted keys, one per line.", "none")
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        option("--allow-origin", "Allow web pages of this origin (CORS); repeat for several.", "none"),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        option(
            "--served-model-name",
            "Name under which clients find the model; repeat for aliases, or put commas between them. "
            "Responses have the first.",
            default_of("served_model_name", "the last part of --model"),
        ),
    ] = None,
    ray: Ray = None,
    replicas: Annotated[
        str | None,
        option("--replicas", "With --ray: how many replicas answer, or LEAST:MOST by the length of their queues.", "1"),
    ] = None,
    ray_cpus: RayCPUs = None,
) -> None:
    """Serve OpenAI's API over HTTP until SIGTERM or Ctrl-C, then finish running answers and pending writes."""
    folder = next((each for each in store or () if "://" not in each), None)
    given = {
        "model": model,
        "dtype": dtype,
        "device": device,
        "model_kwargs": model_kwargs,
        "policy": policy,
        "ratio": ratio,
        "overflow": overflow,
    }
    settings = settings_of(
        **given,
        store=Path(folder) if folder else None,
        tiers=[each for each in store or () if each != folder] or None,
        served_model_name=",".join(served_model_name or ()) or None,
    ).usable()
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"A server needs the package {error.name}, which is not installed: pip install 'ragfuse-kv[serve]'"
        ) from error
    from ragfuse.serve.keys import Keys, check_host, read_keys

    accepted = [*settings.api_keys, *(api_key or ()), *(read_keys(api_keys_file) if api_keys_file else ())]
    keys = Keys(accepted, settings.salt)
    check_host(host, keys)
    if ray is not None:
        from ragfuse.ray.application import ReplicaOptions
        from ragfuse.ray.cluster import check_cluster

        options = ReplicaOptions.parse(replicas or "1", ray_cpus)
        check_cluster(settings)
    prepare_model(settings)
    logging.getLogger("ragfuse").setLevel(logging.INFO)  # logs a line per answer with what it reused
    console = Console(stderr=True)
    if ray is not None:
        from ragfuse.ray.application import serve as run_on_ray

        def tell(url: str) -> None:
            name = next(iter(settings.served_model_name), Path(settings.model).name)
            status.stop()
            _announce(console, name, url)

        with console.status("starting Ray and the replicas") as status:
            run_on_ray(settings, accepted, host, port, allow_origin or (), options, ray, tell, partial(_say, console))
        return
    with console.status("loading the model") as status:
        from ragfuse.serve.server import serve as run
        from ragfuse.serve.service import Service

        service = Service(settings, keys)

        def announce(url: str) -> None:
            status.stop()
            _announce(console, service.model, url)

        run(service, host, port, allow_origin or (), announce, partial(_say, console))


def _announce(console: Console, name: str, url: str) -> None:
    """Print where a server answers, and where its page is."""
    for line in (f"{name} answers at {url} (Ctrl-C ends it).", f"Try it in a browser: {url.removesuffix('/v1')}/"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _say(console: Console, line: str) -> None:
    """Print a line of a server that stops. One that nobody can read any more must not keep it from saving."""
    with contextlib.suppress(OSError, ValueError, SystemExit):  # rich ends the program where a pipe is broken
        console.print(line, highlight=False, markup=False, soft_wrap=True)
