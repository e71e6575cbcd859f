"""ElasticSampler, under Horovod's path."""

from farandole.elastic import ElasticSampler as ElasticSampler
