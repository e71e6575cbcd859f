"""horovod.torch.elastic is farandole.elastic."""

from farandole.elastic import ElasticSampler as ElasticSampler, TorchState as TorchState, run as run
