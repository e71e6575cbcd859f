"""horovod.tensorflow does not exist here."""

raise ImportError("horovod.tensorflow: Farandole is for PyTorch and has no TensorFlow support; use horovod.torch")
