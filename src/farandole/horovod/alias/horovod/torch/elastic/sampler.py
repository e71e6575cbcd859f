"""ElasticSampler, where scripts look for it."""

from farandole.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
