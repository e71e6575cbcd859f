"""The objects of a job on Kubernetes, as `farandole kubernetes manifest` prints them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from farandole.errors import ConfigError

Manifest: TypeAlias = dict[str, Any]
ManifestKind: TypeAlias = Literal["job", "jobset", "trainingruntime"]
KINDS: tuple[ManifestKind, ...] = ("job", "jobset", "trainingruntime")

PORT = 29400
LEFT_EXIT_CODE = 143
"""Exit code of an agent whose pod is taken away before the job's end: a Job counts a pod that ends with 0 as done, and
would not make another one."""

_STOPPED_EXIT_CODE = 130  # of the agents when the coordinator's pod is taken away
_FAILED_EXIT_CODES = (1, 2)  # of a job that has failed, or of an agent that finds none

_SHARED_MEMORY = "/dev/shm"
_SECRET_FOLDER, _TLS_FOLDER = "/etc/farandole", "/etc/farandole-tls"
_TERMINATION_S = 60  # from SIGTERM to SIGKILL
_GRACE_S = 50  # of it for the workers to reach their next boundary
_RETRY_S = 600  # for which agents look for a coordinator that is being made anew
_INSTANCE, _COMPONENT = "app.kubernetes.io/instance", "app.kubernetes.io/component"
_JOBSET_NAME, _REPLICATED_JOB = "jobset.sigs.k8s.io/jobset-name", "jobset.sigs.k8s.io/replicatedjob-name"


@dataclass(frozen=True)
class ManifestOptions:
    """What the objects are made of. Raises ConfigError for values that contradict each other.

    name         of the job, and the beginning of all names
    command      of the workers
    num_proc     the number of workers; max_np, min_np: as for `farandole run`
    slots        workers in one pod
    gpus         of NVIDIA, of one pod
    cpu, memory  requests and limits of one pod, as Kubernetes writes them; empty: none
    shared_memory  the size limit of /dev/shm; empty: the pod's memory limit counts
    kind         one of KINDS
    queue        a LocalQueue of Kueue; empty: the job is not queued
    secret       a Secret that exists, with the key `token`; empty: one with `token` is made
    tls_secret   a Secret that exists, with the files of `farandole certificates`; empty: nothing is encrypted
    run_options  further options of `farandole run`
    """

    name: str
    image: str
    command: Sequence[str]
    num_proc: int
    min_np: int = 1
    max_np: int | None = None
    slots: int = 1
    gpus: int = 0
    cpu: str = ""
    memory: str = ""
    shared_memory: str = ""
    namespace: str = "default"
    kind: ManifestKind = "job"
    queue: str = ""
    secret: str = ""
    tls_secret: str = ""
    token: str = field(default="", repr=False)
    run_options: Sequence[str] = ()

    def __post_init__(self) -> None:
        for flag, value in (("-np", self.num_proc), ("--slots", self.slots), ("--min-np", self.min_np)):
            if value < 1:
                raise ConfigError(f"{flag} must be at least 1, got {value}")
        if not self.min_np <= self.num_proc <= self.most_workers:
            raise ConfigError(
                f"-np {self.num_proc} must be between --min-np {self.min_np} and --max-np {self.most_workers}"
            )
        if self.num_proc % self.slots:
            raise ConfigError(f"-np {self.num_proc} is no multiple of --slots {self.slots}, the workers of one pod")
        if not self.command:
            raise ConfigError("the command of the workers is missing, for example: python train.py")

    @property
    def most_workers(self) -> int:
        """As in JobConfig."""
        return self.num_proc if self.max_np is None else self.max_np

    @property
    def pods(self) -> int:
        """The number of worker pods."""
        return self.num_proc // self.slots

    @property
    def is_resumed(self) -> bool:
        """Whether a second attempt continues from a checkpoint."""
        return any(each == "--checkpoint" or each.startswith("--checkpoint=") for each in self.run_options)

    @property
    def secret_name(self) -> str:
        """The name of the Secret with the token."""
        return self.secret or f"{self.name}-token"


def manifests(options: ManifestOptions) -> list[Manifest]:
    """Return all objects of the job, in the order in which they are to be made."""
    objects = [*_access(options), *([] if options.secret else [_secret(options)])]
    if options.kind == "job":
        objects += [_service(options), _coordinator_job(options), _worker_job(options)]
    elif options.kind == "jobset":
        objects.append(_job_set(options))
    else:
        objects += [_training_runtime(options), _train_job(options)]
    return objects


def _access(options: ManifestOptions) -> list[Manifest]:
    """The right of the coordinator to see the pods."""
    metadata = _metadata(options, f"{options.name}-coordinator")
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    account = {"kind": "ServiceAccount", "name": metadata["name"], "namespace": options.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": metadata["name"]}
    return [
        _object("v1", "ServiceAccount", metadata),
        _object("rbac.authorization.k8s.io/v1", "Role", metadata, rules=[rule]),
        _object("rbac.authorization.k8s.io/v1", "RoleBinding", metadata, roleRef=role, subjects=[account]),
    ]


def _secret(options: ManifestOptions) -> Manifest:
    metadata = _metadata(options, options.secret_name)
    return _object("v1", "Secret", metadata, type="Opaque", stringData={"token": options.token})


def _service(options: ManifestOptions) -> Manifest:
    """A name for the coordinator's pod, also before it is ready: agents wait for it themselves."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_INSTANCE: options.name, _COMPONENT: "coordinator"},
        "ports": [{"name": "coordinator", "port": PORT}],
    }
    return _object("v1", "Service", _metadata(options, options.name), spec=spec)


def _coordinator_job(options: ManifestOptions) -> Manifest:
    metadata = _metadata(options, f"{options.name}-coordinator", queued=True)
    return _object("batch/v1", "Job", metadata, spec=_coordinator_spec(options))


def _worker_job(options: ManifestOptions) -> Manifest:
    metadata = _metadata(options, f"{options.name}-worker", queued=True)
    if options.queue:
        metadata["annotations"] = {"kueue.x-k8s.io/elastic-job": "true"}
    return _object("batch/v1", "Job", metadata, spec=_worker_spec(options, "worker"))


def _job_set(options: ManifestOptions) -> Manifest:
    metadata = _metadata(options, options.name, queued=True)
    return _object("jobset.x-k8s.io/v1alpha2", "JobSet", metadata, spec=_job_set_spec(options, worker="worker"))


def _training_runtime(options: ManifestOptions) -> Manifest:
    spec = _job_set_spec(options, worker="node")
    # The Trainer sets the number of nodes where it finds this label.
    spec["replicatedJobs"][1]["template"]["metadata"] = {
        "labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    }
    spec = {"mlPolicy": {"numNodes": options.pods}, "template": {"spec": spec}}
    return _object("trainer.kubeflow.org/v1alpha1", "TrainingRuntime", _metadata(options, options.name), spec=spec)


def _train_job(options: ManifestOptions) -> Manifest:
    reference = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": options.name}
    metadata = _metadata(options, options.name, queued=True)
    return _object("trainer.kubeflow.org/v1alpha1", "TrainJob", metadata, spec={"runtimeRef": reference})


def _job_set_spec(options: ManifestOptions, worker: str) -> Manifest:
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["coordinator"]},
        "replicatedJobs": [
            {"name": "coordinator", "replicas": 1, "template": {"spec": _coordinator_spec(options, worker)}},
            {"name": worker, "replicas": 1, "template": {"spec": _worker_spec(options, worker)}},
        ],
    }


# Pods -----------------------------------------------------------------------------------------------------------------
#
# Variables are named FARANDOLE_..., since others of the coordinator travel to the workers, and would replace theirs.


def _coordinator_spec(options: ManifestOptions, worker: str = "worker") -> Manifest:
    labels = f"{_INSTANCE}={options.name},{_COMPONENT}=worker"
    variables = [_field("FARANDOLE_POD_IP", "status.podIP")]
    if options.kind != "job":
        variables.append(_field("FARANDOLE_JOBSET", f"metadata.labels['{_JOBSET_NAME}']"))
        labels = f"{_JOBSET_NAME}=$(FARANDOLE_JOBSET),{_REPLICATED_JOB}={worker}"
    arguments = [
        *("-np", str(options.num_proc), "--min-np", str(options.min_np)),
        *("--max-np", str(options.most_workers)),
        *("--host", "$(FARANDOLE_POD_IP)", "--port", str(PORT), "--token-file", f"{_SECRET_FOLDER}/token"),
        *("--grace", str(_GRACE_S), *_tls_option(options)),
        *("--kubernetes", labels, *options.run_options, "--", *(each.replace("$(", "$$(") for each in options.command)),
    ]
    pod = _pod(options, "coordinator", "coordinator", ["farandole", "run", *arguments], variables)
    pod["spec"]["serviceAccountName"] = f"{options.name}-coordinator"
    # Only with a checkpoint does a second attempt continue what the first one has done.
    return {
        "completionMode": "Indexed",
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 6 if options.is_resumed else 0,
        "podFailurePolicy": {"rules": [_ignore_disruptions()]},
        "template": pod,
    }


def _worker_spec(options: ManifestOptions, container: str) -> Manifest:
    variables = [_field("FARANDOLE_POD_NAME", "metadata.name"), _field("FARANDOLE_POD_UID", "metadata.uid")]
    coordinator = options.name
    if options.kind != "job":
        variables.append(_field("FARANDOLE_JOBSET", f"metadata.labels['{_JOBSET_NAME}']"))
        coordinator = "$(FARANDOLE_JOBSET)-coordinator-0-0.$(FARANDOLE_JOBSET)"
    arguments = [
        *("--join", f"{coordinator}:{PORT}", "--host", "$(FARANDOLE_POD_NAME)", "--id", "$(FARANDOLE_POD_UID)"),
        *("--slots", str(options.slots), "--token-file", f"{_SECRET_FOLDER}/token"),
        *("--retry", str(_RETRY_S), "--grace", str(_GRACE_S), "--left-exit-code", str(LEFT_EXIT_CODE)),
        *_tls_option(options),
    ]
    pod = _pod(options, "worker", container, ["farandole", "agent", *arguments], variables)
    spec = pod["spec"]
    spec["automountServiceAccountToken"] = False
    spec["containers"][0]["volumeMounts"].append({"name": "shared-memory", "mountPath": _SHARED_MEMORY})
    size = {"sizeLimit": options.shared_memory} if options.shared_memory else {}
    spec["volumes"].append({"name": "shared-memory", "emptyDir": {"medium": "Memory", **size}})
    amounts = {"cpu": options.cpu, "memory": options.memory, "nvidia.com/gpu": str(options.gpus or "")}
    if given := {name: amount for name, amount in amounts.items() if amount}:
        spec["containers"][0]["resources"] = {"requests": given, "limits": given}
    left, failed = (
        {"containerName": container, "operator": "In", "values": [*codes]}
        for codes in ((_STOPPED_EXIT_CODE, LEFT_EXIT_CODE), _FAILED_EXIT_CODES)
    )
    rules = [_ignore_disruptions(), {"action": "Ignore", "onExitCodes": left}]
    if not options.is_resumed:  # else the agents are needed again
        rules.append({"action": "FailJob", "onExitCodes": failed})
    return {
        "completionMode": "Indexed",
        "completions": options.pods,
        "parallelism": options.pods,
        "backoffLimitPerIndex": 10,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }


def _pod(
    options: ManifestOptions, component: str, container: str, command: list[str], variables: list[Manifest]
) -> Manifest:
    secrets = {"token": (options.secret_name, _SECRET_FOLDER)}
    if options.tls_secret:
        secrets["certificates"] = (options.tls_secret, _TLS_FOLDER)
    return {
        "metadata": {"labels": {_INSTANCE: options.name, _COMPONENT: component}},
        "spec": {
            "restartPolicy": "Never",  # a new pod instead, with a new UID
            "terminationGracePeriodSeconds": _TERMINATION_S,
            # Orphans are reaped; and the agent's guard outlives it for long enough to report its death.
            "shareProcessNamespace": True,
            "containers": [
                {
                    "name": container,
                    "image": options.image,
                    "command": command[:2],
                    "args": command[2:],
                    "env": variables,
                    "volumeMounts": [
                        {"name": name, "mountPath": folder, "readOnly": True} for name, (_, folder) in secrets.items()
                    ],
                }
            ],
            "volumes": [
                {"name": name, "secret": {"secretName": secret, "defaultMode": 0o400}}
                for name, (secret, _) in secrets.items()
            ],
        },
    }


def _tls_option(options: ManifestOptions) -> tuple[str, ...]:
    return ("--tls", _TLS_FOLDER) if options.tls_secret else ()


def _field(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _ignore_disruptions() -> Manifest:
    return {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _object(version: str, kind: str, metadata: Manifest, **content: Any) -> Manifest:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def _metadata(options: ManifestOptions, name: str, queued: bool = False) -> Manifest:
    labels = {"app.kubernetes.io/name": "farandole", _INSTANCE: options.name}
    if queued and options.queue:
        labels["kueue.x-k8s.io/queue-name"] = options.queue
    return {"name": name, "namespace": options.namespace, "labels": labels}
