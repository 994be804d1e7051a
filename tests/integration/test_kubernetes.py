"""deploy/kubernetes as kustomize renders it: against Kubernetes' own schemas, the settings, the images and itself."""

import base64
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
import yaml

from opengyre.proto.ids import check_token
from opengyre.shared.bus.rights import RIGHTS
from opengyre.shared.settings import Settings, load
from opengyre.sizing.hardware import GIB, Hardware, machine_of

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
OVERLAYS = ("small", "gpu")
VERSIONS = ("1.32", "1.37")
"""Of Kubernetes: the oldest that knows all that is asked for, and the newest whose schemas were there."""
SERVICES = {"gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer", "host"}
WORKLOADS = {"Deployment", "StatefulSet", "DaemonSet", "Job"}


@dataclass(frozen=True)
class Rendered:
    documents: list[dict[str, Any]]

    def kind(self, *kinds: str) -> list[dict[str, Any]]:
        return [one for one in self.documents if one["kind"] in kinds]

    def one(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        (found,) = [
            one
            for one in self.kind(kind)
            if one["metadata"]["name"] == name and one["metadata"].get("namespace") == namespace
        ]
        return found

    def workload(self, name: str) -> dict[str, Any]:
        (found,) = [one for one in self.kind(*WORKLOADS) if one["metadata"]["name"] == name]
        return found


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    return workload["spec"]["template"]["spec"]


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod(workload).get("initContainers", ()), *pod(workload)["containers"]]


def main_container(workload: dict[str, Any]) -> dict[str, Any]:
    (found,) = pod(workload)["containers"]
    return found


@pytest.fixture(scope="module")
def kustomized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rendered]:
    """Every overlay, with Secrets made for it in a copy."""
    copy = tmp_path_factory.mktemp("deploy") / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", copy, ignore=shutil.ignore_patterns("*.env"))
    subprocess.run(["sh", str(copy / "secrets" / "make.sh")], check=True, timeout=30)
    # The wheel in our own environment before one of the machine: it is what was tried.
    kubectl = Path(sys.executable).parent / "kubectl"
    found = {}
    for overlay in OVERLAYS:
        done = subprocess.run(
            [str(kubectl), "kustomize", str(copy / "overlays" / overlay)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == "", "nothing deprecated is used"
        found[overlay] = Rendered(list(yaml.safe_load_all(done.stdout)))
    return found


@pytest.fixture(params=OVERLAYS)
def rendered(request: pytest.FixtureRequest, kustomized: dict[str, Rendered]) -> Rendered:
    return kustomized[request.param]


@pytest.mark.parametrize("version", VERSIONS)
def test_every_document_holds_to_the_schema_and_has_nothing_beyond_it(rendered: Rendered, version: str) -> None:
    for document in rendered.documents:
        kubernetes_validate.validate(document, version, strict=True)


def test_the_schema_refuses_a_field_that_is_none(kustomized: dict[str, Rendered]) -> None:
    broken = json.loads(json.dumps(kustomized["small"].workload("gateway")))
    main_container(broken)["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def test_everything_is_there_once(rendered: Rendered) -> None:
    names = [(one["kind"], one["metadata"].get("namespace"), one["metadata"]["name"]) for one in rendered.documents]
    assert len(names) == len(set(names))
    there = {one["metadata"]["name"] for one in rendered.kind(*WORKLOADS)}
    assert there == SERVICES | {"nats", "valkey", "bootstrap", "tools"}
    spaces = {one["metadata"]["name"] for one in rendered.kind("Namespace")}
    for kind, namespace, name in names:
        assert kind == "Namespace" or namespace in spaces, name
    assert rendered.workload("nats")["spec"]["replicas"] == 3
    shared = rendered.one("PersistentVolumeClaim", "opengyre", "state")
    assert shared["spec"]["accessModes"] == ["ReadWriteMany"]


def test_images_are_the_dockerfiles_and_named_once() -> None:
    text = (DEPLOY / "kubernetes" / "base" / "kustomization.yaml").read_text(encoding="utf-8")
    named = {one["name"]: one for one in yaml.safe_load(text)["images"]}
    used: list[str] = []
    for path in (DEPLOY / "kubernetes" / "base").rglob("*.yaml"):
        used += re.findall(r"^ +image: (\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(used) == named.keys()
    for name, image in named.items():
        assert image["newName"].rpartition("/")[2] == f"opengyre-{name}"
        assert image["newTag"][0].isdigit(), "a tag that moves is another image tomorrow"


def test_every_image_has_a_registry_and_a_version(rendered: Rendered) -> None:
    for workload in rendered.kind(*WORKLOADS):
        for container in containers(workload):
            assert re.fullmatch(r"registry\.example\.com/opengyre-[a-z-]+:\d[\w.]*", container["image"])


def secret(rendered: Rendered, namespace: str, name: str) -> dict[str, str]:
    data = rendered.one("Secret", namespace, name)["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def generated(rendered: Rendered, name: str) -> str:
    """Its name with the digest of its content, so that pods are made anew when that changes."""
    names = [one["metadata"]["name"] for one in rendered.kind("Secret")]
    (found,) = [one for one in names if re.fullmatch(rf"{name}-[a-z0-9]{{10}}", one)]
    return found


def environment(rendered: Rendered, workload: dict[str, Any]) -> dict[str, str]:
    """As the container sees it; every reference must lead somewhere."""
    namespace = workload["metadata"]["namespace"]
    container = main_container(workload)
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found |= secret(rendered, namespace, source["secretRef"]["name"])
    fields = {"metadata.name": "host-3", "spec.nodeName": "node-1.example.com", "status.podIP": "10.1.2.3"}
    for one in container.get("env", ()):
        if "value" in one:
            found[one["name"]] = one["value"]
        elif "secretKeyRef" in one["valueFrom"]:
            reference = one["valueFrom"]["secretKeyRef"]
            found[one["name"]] = secret(rendered, namespace, reference["name"])[reference["key"]]
        else:
            found[one["name"]] = fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


def settings_of(rendered: Rendered, name: str, folder: Path) -> Settings:
    workload = rendered.workload(name)
    env = environment(rendered, workload)
    (mounted,) = [volume["configMap"]["name"] for volume in pod(workload)["volumes"] if volume["name"] == "settings"]
    data = rendered.one("ConfigMap", workload["metadata"]["namespace"], mounted)["data"]
    (mount,) = [one for one in main_container(workload)["volumeMounts"] if one["name"] == "settings"]
    assert env["GYRE_CONFIG"] == f"{mount['mountPath']}/gyre.toml"
    path = folder / f"{name}.toml"
    path.write_text(data["gyre.toml"], encoding="utf-8")
    given = {key: value for key, value in env.items() if key.startswith("GYRE_")}
    return load(environment={**given, "GYRE_CONFIG": str(path)})


def test_settings_of_every_service_are_known_and_meet(rendered: Rendered, tmp_path: Path) -> None:
    cache = secret(rendered, "opengyre", generated(rendered, "cache"))
    passwords = secret(rendered, "opengyre", generated(rendered, "nats-passwords"))
    for name in (*SERVICES, "bootstrap", "tools"):
        settings = settings_of(rendered, name, tmp_path)
        user = {"tools": "operator"}.get(name, name)
        assert settings.bus.replicas == 3
        servers = settings.bus.url.split(",")
        assert [server.rpartition("@")[2] for server in servers] == [
            f"nats-{n}.nats.opengyre.svc:4222" for n in range(3)
        ]
        assert {server.split("/")[2].partition(":")[0] for server in servers} == {user}
        password = servers[0].rpartition("@")[0].rpartition(":")[2]
        assert passwords[f"BUS_{user.upper()}"] == password
        if name in SERVICES:
            assert (settings.http.bind, settings.http.port) == ("0.0.0.0", 8080)
            assert settings.http.advertise == "10.1.2.3"
        if settings.cache.url is not None:
            assert settings.cache.url == f"redis://:{cache['password']}@valkey.opengyre.svc:6379"
    (key,) = settings_of(rendered, "gateway", tmp_path).gateway.api_keys
    assert environment(rendered, rendered.workload("tools"))["GYRE_API_KEY"] == key.get_secret_value()


def test_hosts_serve_by_the_engine_of_the_overlay(kustomized: dict[str, Rendered], tmp_path: Path) -> None:
    assert settings_of(kustomized["small"], "host", tmp_path).host.engine == "tiny"
    hosts = kustomized["gpu"].workload("host")
    settings = settings_of(kustomized["gpu"], "host", tmp_path).host
    assert settings.engine == "vllm"
    container = main_container(hosts)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert container["resources"]["requests"]["nvidia.com/gpu"] == str(gpus)
    assert settings.vllm_tensor_parallel == settings.ranks == gpus
    assert settings.vllm_python == "/opt/vllm/bin/python"
    assert "/opt/vllm/bin/python" in (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    assert container["image"].endswith("opengyre-host-gpu:0.1.0")
    memory = {volume["name"] for volume in pod(hosts)["volumes"] if volume.get("emptyDir", {}).get("medium")}
    assert [one["mountPath"] for one in container["volumeMounts"] if one["name"] in memory] == ["/dev/shm"]


def test_cells_of_the_gpu_overlay_are_those_of_the_recipe(kustomized: dict[str, Rendered]) -> None:
    """Two hosts were a cell: eight GPUs were two cells of four, and the recipe's dry run was of four cells of two."""
    recipe = tomllib.loads((ROOT / "recipes/qwen3-8gpu.toml").read_text(encoding="utf-8"))
    hardware = msgspec.convert(recipe["hardware"], Hardware)
    hosts = kustomized["gpu"].workload("host")
    gpus = int(main_container(hosts)["resources"]["limits"]["nvidia.com/gpu"])
    count, in_a_cell = hosts["spec"]["replicas"], int(environment(kustomized["gpu"], hosts)["HOSTS_PER_CELL"])
    machine = machine_of(hardware, cores=1, free_bytes=GIB)
    assert (count // in_a_cell, in_a_cell * gpus) == (machine.cells, machine.cell_gpus)
    assert (count % in_a_cell, count * gpus) == (0, machine.gpus)


def test_no_password_is_in_the_repository_and_git_takes_none() -> None:
    folder = DEPLOY / "kubernetes" / "secrets"
    tracked = subprocess.run(
        ["git", "ls-files", "."], cwd=folder, capture_output=True, text=True, timeout=30, check=False
    )
    if tracked.returncode != 0:
        pytest.skip("not a checkout of git")
    assert not [name for name in tracked.stdout.split() if name.endswith(".env")]
    ignored = subprocess.run(["git", "check-ignore", "-q", "nats.env"], cwd=folder, timeout=30, check=False)
    assert ignored.returncode == 0


def test_passwords_are_made_once_and_for_ones_own_eyes(tmp_path: Path) -> None:
    script = tmp_path / "make.sh"
    shutil.copy(DEPLOY / "kubernetes" / "secrets" / "make.sh", script)
    first = subprocess.run(["sh", str(script)], check=True, capture_output=True, text=True, timeout=30)
    assert (first.stdout, first.stderr) == ("", "")
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.env")}
    assert made.keys() == {"nats.env", "bus.env", "sandbox.env", "cache.env", "api.env"}
    for name in made:
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    passwords = dict(line.split("=", 1) for line in made["nats.env"].splitlines())
    assert passwords.keys() == {f"BUS_{user.upper()}" for user in (*RIGHTS, "bootstrap", "route", "routes")}
    assert len(set(passwords.values())) == len(passwords)
    assert all(re.fullmatch(r"p[0-9a-f]{48}", value) for key, value in passwords.items() if key != "BUS_ROUTES")
    assert passwords["BUS_ROUTES"].count(passwords["BUS_ROUTE"]) == 3
    assert made["sandbox.env"].count("=") == 1, "the machines of sandboxes have no password but their own"
    again = subprocess.run(["sh", str(script)], check=True, capture_output=True, text=True, timeout=30)
    assert "is kept" in again.stderr
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.glob("*.env")} == made


def test_the_brokers_find_each_other_where_their_service_says(rendered: Rendered) -> None:
    service = rendered.one("Service", "opengyre", "nats")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    brokers = rendered.workload("nats")
    assert brokers["spec"]["serviceName"] == "nats"
    (mounted,) = [one["configMap"]["name"] for one in pod(brokers)["volumes"] if "configMap" in one]
    data = rendered.one("ConfigMap", "opengyre", mounted)["data"]
    env = environment(rendered, brokers)
    text = data["nats.conf"] + data["users.conf"]
    assert set(re.findall(r"\$([A-Z_]+)(?![A-Z_.])", text)) - {"KV", "JS", "SRV"} == env.keys()
    ports = {one["name"]: one["containerPort"] for one in main_container(brokers)["ports"]}
    assert f"listen: 0.0.0.0:{ports['client']}" in text
    assert f"listen: 0.0.0.0:{ports['route']}" in text
    assert f"http: 0.0.0.0:{ports['monitor']}" in text
    (data_mount,) = [one["mountPath"] for one in main_container(brokers)["volumeMounts"] if one["name"] == "data"]
    assert f"store_dir: {data_mount}/" in text


def matches(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()


def test_what_selects_selects_something(rendered: Rendered) -> None:
    labels = [
        (one["metadata"]["namespace"], one["spec"]["template"]["metadata"]["labels"], one)
        for one in rendered.kind(*WORKLOADS)
    ]
    for one in rendered.kind("Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = one["spec"]
        selector = spec.get("selector", spec.get("podSelector"))
        selector = selector.get("matchLabels", {} if selector == {} else selector)
        chosen = [
            workload
            for namespace, pod_labels, workload in labels
            if namespace == one["metadata"]["namespace"] and matches(selector, pod_labels)
        ]
        assert chosen, one["metadata"]["name"]
        if one["kind"] == "Service":
            (workload,) = chosen
            named = {port["name"] for port in main_container(workload)["ports"]}
            numbered = {port["containerPort"] for port in main_container(workload)["ports"]}
            for port in spec["ports"]:
                assert port.get("targetPort", port["port"]) in named | numbered, one["metadata"]["name"]
        for rule in [*spec.get("ingress", ()), *spec.get("egress", ())]:
            for peer in rule.get("from", rule.get("to", ())):
                wanted = peer.get("podSelector", {}).get("matchLabels", {})
                assert [1 for _, pod_labels, _ in labels if matches(wanted, pod_labels)], one["metadata"]["name"]
        if one["kind"] == "NetworkPolicy":
            named = {port["name"] for workload in chosen for port in main_container(workload).get("ports", ())}
            for rule in spec.get("ingress", ()):
                assert {port["port"] for port in rule["ports"]} <= named, one["metadata"]["name"]
    for namespace, pod_labels, workload in labels:
        if workload["kind"] != "Job":
            assert matches(workload["spec"]["selector"]["matchLabels"], pod_labels), namespace


def test_every_reference_leads_somewhere(rendered: Rendered) -> None:
    for workload in rendered.kind(*WORKLOADS):
        namespace, name = workload["metadata"]["namespace"], workload["metadata"]["name"]
        environment(rendered, workload)
        rendered.one("ServiceAccount", namespace, pod(workload)["serviceAccountName"])
        there = {volume["name"] for volume in pod(workload).get("volumes", ())}
        there |= {one["metadata"]["name"] for one in workload["spec"].get("volumeClaimTemplates", ())}
        used = {mount["name"] for container in containers(workload) for mount in container.get("volumeMounts", ())}
        assert used == there, name
        for volume in pod(workload).get("volumes", ()):
            if "configMap" in volume:
                rendered.one("ConfigMap", namespace, volume["configMap"]["name"])
            if "persistentVolumeClaim" in volume:
                rendered.one("PersistentVolumeClaim", namespace, volume["persistentVolumeClaim"]["claimName"])


def test_probes_ask_what_answers(rendered: Rendered) -> None:
    routes = (ROOT / "shared" / "opengyre" / "shared" / "http.py").read_text(encoding="utf-8")
    for workload in rendered.kind("Deployment", "StatefulSet", "DaemonSet"):
        name, container = workload["metadata"]["name"], main_container(workload)
        if name == "tools":
            continue
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]
            if name == "valkey":
                assert asked["exec"]["command"][1] == "/opt/opengyre/deploy/probe.py"
                continue
            assert asked["httpGet"]["port"] in {port["name"] for port in container["ports"]}, name
            if name in SERVICES:
                assert f'Route("{asked["httpGet"]["path"]}"' in routes
            if name in SERVICES and probe == "readinessProbe":
                assert asked["httpGet"]["path"] == ("/readyz" if name == "gateway" else "/healthz"), name
        # Kubernetes waits for as long as the slowest start may take.
        start = container["startupProbe"]
        assert start["periodSeconds"] * start.get("failureThreshold", 3) >= 30, name


def test_rights_are_the_least_that_work(rendered: Rendered) -> None:
    spaces = {one["metadata"]["name"]: one["metadata"]["labels"] for one in rendered.kind("Namespace")}
    assert spaces["opengyre"]["pod-security.kubernetes.io/enforce"] == "restricted"
    for account in rendered.kind("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False
    for workload in rendered.kind(*WORKLOADS):
        name, spec = workload["metadata"]["name"], pod(workload)
        for secured in containers(workload):
            security = secured["securityContext"]
            assert security["allowPrivilegeEscalation"] is False, name
            assert security["readOnlyRootFilesystem"] is True, name
            assert security["capabilities"]["drop"] == ["ALL"], name
            assert secured["resources"]["limits"]["memory"], name
            assert secured["resources"]["requests"].keys() >= {"cpu", "memory"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & spec.keys(), name
        assert spec["enableServiceLinks"] is False, f"{name}: variables named after Services would be settings"
        outside = [volume["hostPath"]["path"] for volume in spec.get("volumes", ()) if "hostPath" in volume]
        if name == "sandbox":
            assert workload["metadata"]["namespace"] == "opengyre-sandbox"
            service = main_container(workload)["securityContext"]
            assert set(service["capabilities"]["add"]) == {"SYS_ADMIN", "SETUID", "SETGID", "SETPCAP"}
            assert service["seccompProfile"] == {"type": "Localhost", "localhostProfile": "opengyre/sandbox.json"}
            assert outside == ["/var/lib/kubelet/seccomp/opengyre"]
            assert not [one for one in main_container(workload)["volumeMounts"] if one["name"] == "profiles"]
        else:
            assert workload["metadata"]["namespace"] == "opengyre", name
            assert outside == [], name
            assert spec["securityContext"]["runAsNonRoot"] is True, name
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
            assert "add" not in main_container(workload)["securityContext"]["capabilities"], name


def test_who_speaks_to_whom_is_let_through(rendered: Rendered) -> None:
    for workload in rendered.kind(*WORKLOADS):
        env = environment(rendered, workload)
        label = workload["spec"]["template"]["metadata"]["labels"].get("opengyre.io/bus")
        assert (label == "true") == ("GYRE_BUS__URL" in env), workload["metadata"]["name"]
    policy = rendered.one("NetworkPolicy", "opengyre-sandbox", "sandbox")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in policy


STUB = """#!/bin/sh
echo "$@"
env | grep ^GYRE_ | sort
"""


def entered(folder: Path, service: str, **more: str) -> subprocess.CompletedProcess[str]:
    for program in ("python", "sh"):
        stub = folder / program
        stub.write_text(STUB, encoding="utf-8")
        stub.chmod(0o755)
    env = {"PATH": f"{folder}:{os.environ['PATH']}", "SERVICE": service, "GYRE_HTTP__ADVERTISE": "10.0.0.1", **more}
    command = ["/bin/sh", str(DEPLOY / "entrypoint.sh")]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False, env=env)


def test_neighbours_are_a_cell(tmp_path: Path) -> None:
    cells = []
    for number in (0, 1, 2, 11):
        done = entered(tmp_path, "host", GYRE_HOST__HOST=f"host-{number}", HOSTS_PER_CELL="2")
        assert done.returncode == 0, done.stderr
        cells += re.findall(r"GYRE_HOST__CELL=(\S+)", done.stdout)
    assert cells == ["cell-0", "cell-0", "cell-1", "cell-5"]
    assert "GYRE_HOST__CELL" not in entered(tmp_path, "host", GYRE_HOST__HOST="host0").stdout
    done = entered(tmp_path, "host", GYRE_HOST__HOST="host_gpu", HOSTS_PER_CELL="2")
    assert done.returncode == 64
    assert "must end in its own" in done.stderr


def test_a_machines_name_is_a_nodes_name_without_dots(tmp_path: Path) -> None:
    done = entered(tmp_path, "sandbox", NODE_NAME="ip-10-0-0-1.ec2.internal")
    assert done.stdout.splitlines()[0] == "/opt/opengyre/deploy/sandbox.sh"
    (node,) = re.findall(r"GYRE_SANDBOX__NODE=(\S+)", done.stdout)
    assert check_token("sandbox.node", node) == "ip-10-0-0-1-ec2-internal"
    assert "GYRE_SANDBOX__NODE" not in entered(tmp_path, "sandbox").stdout
