"""An S3 server on loopback, in a separate process that tests kill and restart.

It loses its contents when it ends; `start` creates the bucket again.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from typing import Any

import s3fs

from ..ports import free_port

BUCKET = "bucket"
KEY, SECRET = "AKIADUMMYDUMMYDUMMY1", "dummy/Secret+that/must+never+be/printed1"

_SERVE = """
import sys, threading, time
from moto.moto_server import threaded_moto_server
from moto.server import ThreadedMotoServer
num_requests, lock = 0, threading.Lock()
class Application(threaded_moto_server.DomainDispatcherApplication):
    def __call__(self, environ, start_response):
        global num_requests
        if environ["PATH_INFO"] == "/num-requests":
            start_response("200 OK", [])
            return [str(num_requests).encode()]
        with lock:
            num_requests += 1
        time.sleep(float(sys.argv[2]))
        return super().__call__(environ, start_response)
threaded_moto_server.DomainDispatcherApplication = Application
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


class S3:
    """The server, whose port survives a restart. It waits `latency_s` before each request."""

    def __init__(self, latency_s: float = 0.0) -> None:
        self._latency_s = latency_s
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            # By default the driver retries for half a minute.
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.start()

    def start(self) -> None:
        """Returns when it answers, with an empty bucket."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(self.port), str(self._latency_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.files().mkdir(BUCKET)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def num_requests(self) -> int:
        """Number of requests since the start."""
        with urllib.request.urlopen(f"{self.url}/num-requests", timeout=60) as answer:
            return int(answer.read())

    def files(self) -> Any:
        """A file system for its contents, not shared with the code under test."""
        return s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=self.url, skip_instance_cache=True
        )

    def steps(self, prefix: str) -> list[str]:
        """Names of the directories below a prefix of the bucket."""
        return sorted(p.rpartition("/")[2] for p in self.files().ls(f"{BUCKET}/{prefix}"))
