"""What children are told of their parent's environment."""

from __future__ import annotations

from farandole import env
from farandole.membership import Placement


def test_children_do_not_inherit_what_an_outer_job_said() -> None:
    said = {**env.worker_environment("@farandole-1", "w3", "secret", 2), "HOME": "/home/somebody"}
    assert env.inherited_environment(said) == {"HOME": "/home/somebody"}


def test_the_place_in_an_outer_job_is_not_inherited_but_the_user_s_settings_are() -> None:
    outer = env.horovod_environment(Placement(0, 1, 0, 1, 0, 1), "node1", is_elastic=False)
    said = {**outer, "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_FUSION_THRESHOLD": "0"}
    assert env.inherited_environment(said) == {"HOROVOD_FUSION_THRESHOLD": "0"}
