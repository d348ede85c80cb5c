"""An S3 server on loopback, in a separate process that tests kill and restart.

It loses its contents when it ends; `start` creates the bucket again.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import s3fs

from ..ports import free_port

BUCKET = "bucket"
KEY, SECRET = "AKIADUMMYDUMMYDUMMY1", "dummy/Secret+that/must+never+be/printed1"

_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", int(sys.argv[1]), verbose=False)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""


class S3:
    """The server. Its port is the same after a restart."""

    def __init__(self) -> None:
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
            [sys.executable, "-c", _SERVE, str(self.port)],
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

    def files(self) -> Any:
        """A file system for its contents, not shared with the code under test."""
        return s3fs.S3FileSystem(
            key=KEY, secret=SECRET, endpoint_url=self.url, skip_instance_cache=True
        )

    def steps(self, prefix: str) -> list[str]:
        """Names of the directories below a prefix of the bucket."""
        return sorted(p.rpartition("/")[2] for p in self.files().ls(f"{BUCKET}/{prefix}"))
