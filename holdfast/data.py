"""Samples for a loop of one's own, each once an epoch through resizes; see docs/user/data.md."""

from holdfast.workers.session.elastic import ElasticSampler, ElasticStream

__all__ = ["ElasticSampler", "ElasticStream"]
