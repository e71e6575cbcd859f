"""Installs farandole.in_place in the workers of a job, also in those that a fork server makes."""

import os

import farandole.env


def _install() -> None:
    if os.environ.get("FARANDOLE_IN_PLACE"):
        from farandole.in_place.torch_patches import install

        install()


def _replace(variables: dict[str, str]) -> None:
    _theirs(variables)
    _install()


_theirs = farandole.env.replace_environment
farandole.env.replace_environment = _replace
if os.environ.get("FARANDOLE_AGENT"):
    _install()
