"""A real S3 server (moto's) on loopback for tests, and what it was asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property
from threading import Event, Thread
from typing import NamedTuple

import pytest

from ragfuse.store.objects import ObjectTier

_folder = itertools.count(1)


class Asked(NamedTuple):
    """One request: method, path with query, and the range that was asked for."""

    method: str
    path: str
    range: str


class S3Server:
    """A server that can be stopped, started again on its port, and told to stand still. Buckets outlive stopping."""

    def __init__(self) -> None:
        for package in ("moto.server", "s3fs"):
            pytest.importorskip(package, reason="S3 is tried with moto and s3fs: pip install 'moto[server]' s3fs")
        self.port, self.asked = 0, list[Asked]()
        self._going, self._held, self._lose = Event(), lambda _: True, False
        self.lie: Callable[[Asked], tuple[str, list[tuple[str, str]], bytes] | None] = lambda asked: None
        self._going.set()
        self.start()

    def start(self) -> None:
        """Answer from now on."""
        from moto.server import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        application = DomainDispatcherApplication(create_backend_app)

        def recorded(environ, respond):
            path = environ["PATH_INFO"] + "?" + environ.get("QUERY_STRING", "")
            asked = Asked(environ["REQUEST_METHOD"], path, environ.get("HTTP_RANGE", ""))
            self.asked.append(asked)
            if (lie := self.lie(asked)) is not None:
                status, headers, body = lie
                if environ.get("HTTP_TRANSFER_ENCODING"):  # it ends by itself; else reading on would wait for ever
                    environ["wsgi.input"].read()
                else:
                    environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                respond(status, [*headers, ("Content-Length", str(len(body)))])
                return [body]
            if self._held(asked):
                going = self._going.is_set()
                self._going.wait()
                if self._lose and not going:
                    raise ConnectionAbortedError
            return application(environ, respond)

        self._server = make_server("127.0.0.1", self.port, recorded, True, request_handler=MotoRequestHandler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._going.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def stand_still(self, held: Callable[[Asked], bool] = lambda _: True, lose: bool = False) -> None:
        """Take requests, and answer none of these; `lose` them for good."""
        self._held, self._lose = held, lose
        self._going.clear()

    def go_on(self) -> None:
        """Answer again."""
        self._going.set()

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

    def user(self, *actions: str) -> dict[str, str]:
        """The environment of a user who may do these alone, once `strict`."""
        import boto3

        with self.reachable():
            iam, name = boto3.client("iam"), f"user{next(_folder)}"
            iam.create_user(UserName=name)
            rights = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
            policy = json.dumps({"Version": "2012-10-17", "Statement": [rights]})
            iam.put_user_policy(UserName=name, PolicyName="rights", PolicyDocument=policy)
            made = iam.create_access_key(UserName=name)["AccessKey"]
        return {"AWS_ACCESS_KEY_ID": made["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": made["SecretAccessKey"]}

    @contextmanager
    def strict(self) -> Iterator[None]:
        """Users may do what they have a right to, and nothing else."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
            yield

    def tier(self, url: str, port: int = 0, user: Mapping[str, str] = {}, **options) -> ObjectTier:
        """A tier whose S3 server this is, or is behind another port; of another user. A busy machine is no outage."""
        with self.reachable(), pytest.MonkeyPatch.context() as patch:
            if port:
                patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
            for name, value in user.items():
                patch.setenv(name, value)
            return ObjectTier(url, **{"timeout_s": 30.0, **options})


@cache
def _reader() -> Callable[[str], object]:
    """As botocore reads its descriptions of services: for every client anew, a fifth of a second of JSON. Once here."""
    from botocore.loaders import JSONFileLoader

    return cache(JSONFileLoader().load_file)


@cache
def shared() -> S3Server:
    """The server of all tests that do not stop it."""
    return S3Server()
