"""Horovod's executors on a Ray cluster; they need `pip install 'farandole[ray]'`."""

from horovod.ray.elastic import ElasticRayExecutor as ElasticRayExecutor
from horovod.ray.runner import RayExecutor as RayExecutor

__all__ = ["ElasticRayExecutor", "RayExecutor"]
