"""horovod.keras does not exist here."""

raise ImportError("horovod.keras: Farandole is for PyTorch and has no Keras support; use horovod.torch")
