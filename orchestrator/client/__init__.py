"""The Python client: `from holdfast import Client`. It starts jobs as `holdfast run` and `holdfast
submit` do, and hands out handles to jobs; what a target can do is decided in cli/targets."""

from .client import Client
from .handle import JobHandle

__all__ = ["Client", "JobHandle"]
