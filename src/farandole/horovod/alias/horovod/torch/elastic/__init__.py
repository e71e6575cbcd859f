"""horovod.torch.elastic is farandole.elastic."""

from farandole.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
