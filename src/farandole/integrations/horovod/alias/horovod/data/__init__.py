"""Loaders that scripts subclass, including ones that read ahead in a thread."""

from horovod.data.data_loader_base import AsyncDataLoaderMixin as AsyncDataLoaderMixin, BaseDataLoader as BaseDataLoader
