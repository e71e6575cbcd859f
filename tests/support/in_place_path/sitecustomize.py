"""Installs farandole.in_place in the workers of a job, also in those that a fork server makes."""

import os

import farandole.env


def _install() -> None:
    if os.environ.get("FARANDOLE_IN_PLACE"):
        for name in ("RANK", "LOCAL_RANK", "LOCAL_SIZE"):
            os.environ[{"LOCAL_SIZE": "LOCAL_WORLD_SIZE"}.get(name, name)] = os.environ[f"HOROVOD_{name}"]
        os.environ.update(WORLD_SIZE=os.environ["HOROVOD_SIZE"], MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
        os.environ.update(
            GROUP_RANK="0", GROUP_WORLD_SIZE="1", TORCHELASTIC_RUN_ID="job", TORCHELASTIC_RESTART_COUNT="0"
        )
        from farandole.in_place.torch_patches import install

        install()


def _replace(variables: dict[str, str]) -> None:
    _theirs(variables)
    _install()


_theirs = farandole.env.replace_environment
farandole.env.replace_environment = _replace
if os.environ.get("FARANDOLE_AGENT"):
    _install()
