"""ElasticSampler, where scripts look for it."""

from farandole.data.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
