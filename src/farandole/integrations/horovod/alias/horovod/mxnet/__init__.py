"""horovod.mxnet does not exist here."""

raise ImportError("horovod.mxnet: Farandole is for PyTorch and has no MXNet support; use horovod.torch")
