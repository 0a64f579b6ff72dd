"""A real S3 server (moto's) on loopback for tests, and what it was asked."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from threading import Thread

import pytest

from ragfuse.store.objects import ObjectTier

_folder = itertools.count(1)


class S3Server:
    """A server that can be stopped."""

    def __init__(self) -> None:
        for package in ("moto.server", "s3fs"):
            pytest.importorskip(
                package, reason="S3 is tried with moto and s3fs: pip install 'moto[server]' s3fs"
            )
        self.port, self.asked = 0, list[str]()
        self.start()

    def start(self) -> None:
        """Answer from now on."""
        from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        application = DomainDispatcherApplication(create_backend_app)

        def recorded(environ, respond):
            self.asked.append(environ["PATH_INFO"])
            return application(environ, respond)

        self._server = make_server(
            "127.0.0.1", self.port, recorded, True, request_handler=MotoRequestHandler
        )
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """What a user has in the environment."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """The environment in which this is the S3 server."""
        read = _reader()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("botocore.loaders.JSONFileLoader.load_file", lambda _, path: read(path))
            for name, value in self.environment.items():
                patch.setenv(name, value)
            yield

    def new_url(self) -> str:
        """An empty folder of a bucket."""
        return f"s3://{self.bucket}/folder{next(_folder)}"

    @cached_property
    def bucket(self) -> str:
        """A bucket of this server's own."""
        name = f"bucket-{self.port}"
        self.client.create_bucket(Bucket=name)
        return name

    @cached_property
    def client(self):
        """A client of its own."""
        import boto3

        with self.reachable():
            return boto3.client("s3")

    def tier(self, url: str, **options) -> ObjectTier:
        """A tier whose S3 server this is. A busy machine is no outage."""
        with self.reachable():
            return ObjectTier(url, **{"timeout_s": 30.0, **options})


@cache
def _reader() -> Callable[[str], object]:
    """As botocore reads its descriptions of services: for every client anew, a fifth of a second of
    JSON. Once here.
    """
    from botocore.loaders import JSONFileLoader

    return cache(JSONFileLoader().load_file)


@cache
def shared() -> S3Server:
    """The server of all tests that do not stop it."""
    return S3Server()
