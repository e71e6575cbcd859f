"""Jobs on a Ray cluster: `farandole.ray.run(func)`. It is `pip install 'farandole[ray]'`."""

from farandole.integrations.ray.ray_function import run as run

__all__ = ["run"]
