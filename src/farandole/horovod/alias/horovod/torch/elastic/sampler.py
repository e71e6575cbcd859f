"""ElasticSampler, under Horovod's path."""

from farandole.elastic import ElasticSampler

__all__ = ["ElasticSampler"]
