"""The printed objects of a job on Kubernetes are what its schemas and the parsers of our own commands accept."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from farandole.job.launch.agent_command import agent_parser
from farandole.job.launch.cli import main
from farandole.job.launch.run_parser import run_parser

VARIANTS = [
    (),
    ("--gpus", "2", "--cpu", "8", "--memory", "64Gi", "--shared-memory", "8Gi", "--namespace", "lab"),
    ("--queue", "team-a", "--secret", "mine", "--run-options", "--checkpoint s3://bucket/job --checkpoint-every 5m"),
]


def printed(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    words = ("kubernetes", "manifest", "--image", "registry/train:1", "-np", "4", *options, "python", "train.py")
    assert main(words) == 0
    return list(yaml.safe_load_all(capsys.readouterr().out))


def named(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    [found] = [each for each in objects if each["kind"] == kind and name in each["metadata"]["name"]]
    return found


def pod_specs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the coordinator and of the workers."""
    jobs = [each["spec"] for each in objects if each["kind"] == "Job"]
    for each in objects:
        if each["kind"] == "JobSet":
            jobs += [one["template"]["spec"] for one in each["spec"]["replicatedJobs"]]
        if each["kind"] == "TrainingRuntime":
            jobs += [one["template"]["spec"] for one in each["spec"]["template"]["spec"]["replicatedJobs"]]
    return [job["template"]["spec"] for job in jobs]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainingruntime"])
@pytest.mark.parametrize("options", VARIANTS)
def test_objects_of_kubernetes_itself_fulfil_its_schemas(
    options: tuple[str, ...], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="needs the package kubernetes-validate: make test-engines"
    )
    objects = printed(capsys, "--kind", kind, *options)
    for each in objects:
        if each["apiVersion"] in ("v1", "batch/v1", "rbac.authorization.k8s.io/v1"):
            validator.validate(each, validator.latest_version(), strict=True)
    for spec in pod_specs(objects):  # also those inside of objects of others
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
        validator.validate(pod, validator.latest_version(), strict=True)


@pytest.mark.parametrize("options", VARIANTS)
def test_a_job_set_and_a_training_runtime_fulfil_the_models_of_the_trainer(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api: make test-engines"
    )
    objects = printed(capsys, "--kind", "jobset", *options) + printed(capsys, "--kind", "trainingruntime", *options)
    for kind, model in (
        ("JobSet", models.JobsetV1alpha2JobSet),
        ("TrainingRuntime", models.TrainerV1alpha1TrainingRuntime),
        ("TrainJob", models.TrainerV1alpha1TrainJob),
    ):
        written = named(objects, kind)
        read = model.from_dict(written)
        assert _without_nulls(read.to_dict()) == written  # no field is unknown to the model


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", ["job", "jobset", "trainingruntime"])
@pytest.mark.parametrize("options", VARIANTS)
def test_the_containers_run_commands_that_exist(
    options: tuple[str, ...], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator, worker = (spec["containers"][0] for spec in pod_specs(printed(capsys, "--kind", kind, *options)))
    assert coordinator["command"] == ["farandole", "run"]
    ours, command = coordinator["args"], coordinator["args"][coordinator["args"].index("--") + 1 :]
    run_parser("farandole run")[0].parse_args(ours[: ours.index("--")])
    assert command == ["python", "train.py"]
    assert worker["command"] == ["farandole", "agent"]
    agent_parser().parse_args(worker["args"])


def test_the_coordinator_may_see_pods_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys)
    assert named(objects, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    account = named(objects, "ServiceAccount")["metadata"]
    assert named(objects, "RoleBinding")["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    coordinator, worker = pod_specs(objects)
    assert coordinator["serviceAccountName"] == account["name"]
    assert worker["automountServiceAccountToken"] is False


def test_the_workers_are_an_elastic_indexed_job(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys, "--queue", "team-a", "--gpus", "2")
    job = named(objects, "Job", "worker")
    assert job["metadata"]["annotations"] == {"kueue.x-k8s.io/elastic-job": "true"}
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    ignored = [rule for rule in spec["podFailurePolicy"]["rules"] if rule["action"] == "Ignore"]
    assert ignored[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert ignored[1]["onExitCodes"]["values"] == [130, 143]
    pod = spec["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_agents_find_the_coordinator_by_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    objects = printed(capsys)
    service = named(objects, "Service")
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "None"
    labels = named(objects, "Job", "coordinator")["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    arguments = pod_specs(objects)[1]["containers"][0]["args"]
    assert arguments[arguments.index("--join") + 1] == f"{service['metadata']['name']}:29400"


def test_only_a_job_with_a_checkpoint_is_attempted_again(capsys: pytest.CaptureFixture[str]) -> None:
    once, again = printed(capsys), printed(capsys, "--run-options", "--checkpoint /data/job")
    assert named(once, "Job", "coordinator")["spec"]["backoffLimit"] == 0
    assert named(again, "Job", "coordinator")["spec"]["backoffLimit"] > 0
    actions = [
        [rule["action"] for rule in named(each, "Job", "worker")["spec"]["podFailurePolicy"]["rules"]]
        for each in (once, again)
    ]
    assert actions == [["Ignore", "Ignore", "FailJob"], ["Ignore", "Ignore"]]


def test_each_printed_secret_has_a_new_token_and_an_existing_one_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = (named(printed(capsys), "Secret")["stringData"]["token"] for _ in range(2))
    assert first != second
    assert len(first) == 64
    objects = printed(capsys, "--secret", "mine")
    assert all(each["kind"] != "Secret" for each in objects)
    assert all(spec["volumes"][0]["secret"]["secretName"] == "mine" for spec in pod_specs(objects))


@pytest.mark.parametrize("kind", ["job", "jobset", "trainingruntime"])
def test_certificates_of_a_secret_are_mounted_in_all_pods_and_used(
    capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    for spec in pod_specs(printed(capsys, "--tls-secret", "mine", "--kind", kind)):
        (volume,) = (each for each in spec["volumes"] if each["name"] == "certificates")
        assert volume["secret"] == {"secretName": "mine", "defaultMode": 0o400}
        container = spec["containers"][0]
        (mount,) = (each for each in container["volumeMounts"] if each["name"] == "certificates")
        before_the_script = container["args"][: (container["args"] + ["--"]).index("--")]
        assert before_the_script[before_the_script.index("--tls") + 1] == mount["mountPath"]


def test_a_dollar_of_the_command_is_not_expanded_by_the_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("kubernetes", "manifest", "--image", "x", "-np", "1", "sh", "-c", "echo $(POD_IP)")
    assert main(words) == 0
    coordinator = pod_specs(list(yaml.safe_load_all(capsys.readouterr().out)))[0]
    assert coordinator["containers"][0]["args"][-1] == "echo $$(POD_IP)"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("-np", "3", "--gpus", "2", "true"), "-np 3 is no multiple of --slots 2"),
        (("-np", "2", "--min-np", "3", "true"), "-np 2 must be between --min-np 3 and --max-np 2"),
        (("-np", "0", "true"), "-np must be at least 1, got 0"),
        (("-np", "2"), "the command of the workers is missing"),
        (("-np", "2", "--name", "My_Job", "true"), "--name 'My_Job': it needs small letters"),
        (("-np", "2", "--run-options", "'", "true"), "--run-options"),
    ],
)
def test_what_cannot_work_is_refused(options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(("kubernetes", "manifest", "--image", "x", *options))
    assert refused.value.code == 2
    assert reason in capsys.readouterr().err
