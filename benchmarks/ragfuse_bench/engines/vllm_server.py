"""`vllm serve` with the connector of vllm-ragfuse, in a process group of its own that ends with the benchmark."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from ragfuse.errors import InputError, RagFuseError

STARTED_S, ENDED_S = 900.0, 20.0
CLONE = Path(__file__).resolve().parents[3]
MODULE = "vllm.entrypoints.openai.api_server"


def require_vllm(python: Path | None) -> Path:
    """Return the Python that has vLLM; InputError where none is named or there is none."""
    if python is None or not python.is_file():
        found = "none" if python is None else str(python)
        raise InputError(
            f"Wanted the Python of an environment with vLLM and vllm-ragfuse, found {found}: set one up by `make "
            "venv-vllm` in a clone, and name its bin/python by --vllm."
        )
    return python.absolute()


@contextmanager
def vllm_serving(
    python: Path, model: Path, name: str, dtype: str, place: Path, together: int, threads: int, memory_gib: int
) -> Iterator[tuple[tuple[str, int], int]]:
    """Yield host and port of a server with prefix caching that takes KV over, and the number of its process.

    Args:
        python: The Python that has vLLM.
        model: The model's folder.
        name: What it is called, here and where its KV comes from.
        dtype: What it computes in.
        place: Where KV is handed over.
        together: Answers decoded at once.
        threads: Threads of torch.
        memory_gib: Memory of its KV cache.
    """
    transfer = {
        "kv_connector": "RagfuseConnector",
        "kv_connector_module_path": "vllm_ragfuse",
        "kv_role": "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"transfer_url": str(place), "model": name},
    }
    port = _free_port()
    said = {"host": "127.0.0.1", "port": port, "model": model, "served-model-name": name, "dtype": dtype}
    said |= {"max-num-seqs": together, "kv-transfer-config": json.dumps(transfer)}
    options = [each for option, value in said.items() for each in (f"--{option}", str(value))]
    path = os.pathsep.join([str(CLONE), str(CLONE / "integrations" / "vllm-ragfuse")])
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "VLLM_CPU_KVCACHE_SPACE": str(memory_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
    }
    heard = place.with_name("vllm.log")
    with heard.open("wb") as out:
        process = subprocess.Popen(
            [str(python), "-P", "-m", MODULE, "--enable-prefix-caching", *options],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, ("127.0.0.1", port), heard)
        yield ("127.0.0.1", port), process.pid
    finally:
        _end(process)


@contextmanager
def routed(python: Path, prefills: tuple[str, int], decodes: tuple[str, int], heard: Path) -> Iterator[tuple[str, int]]:
    """Yield host and port of vLLM's router, which has one server prefill and the other decode.

    Args:
        python: The Python beside which `vllm-router` is installed.
        prefills: Host and port of the ragfuse server.
        decodes: Host and port of the vLLM server.
        heard: File of the router's log.
    """
    port = _free_port()
    said: dict[str, object] = {"port": port, "prometheus-port": _free_port(), "worker-startup-check-interval": 1}
    said |= {name: f"http://{host}:{at}" for name, (host, at) in (("prefill", prefills), ("decode", decodes))}
    options = [each for option, value in said.items() for each in (f"--{option}", str(value))]
    command = [str(python.with_name("vllm-router")), "--vllm-pd-disaggregation", *options]
    with heard.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        _wait_until_ready(process, ("127.0.0.1", port), heard)
        yield "127.0.0.1", port
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with its group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_until_ready(process: subprocess.Popen[bytes], place: tuple[str, int], heard: Path) -> None:
    until_s = time.monotonic() + STARTED_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RagFuseError(f"{heard.stem} did not begin: {heard.read_text('utf-8', 'replace')[-1500:].strip()}")
        line = HTTPConnection(*place, timeout=5.0)
        try:
            line.request("GET", "/health")
            if line.getresponse().status == 200:
                return
        except (OSError, HTTPException):
            pass
        finally:
            line.close()
        time.sleep(0.5)
    raise RagFuseError(f"{heard.stem} did not begin within {STARTED_S:g} s. Try a smaller model.")
