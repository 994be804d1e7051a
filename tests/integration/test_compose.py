"""compose.yaml and what it names: as written, and as each Compose tool that is installed here reads it."""

import http.server
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from opengyre.sandbox import machine
from opengyre.shared.embedded import NATS_CONFIG, free_port, valkey_command
from opengyre.shared.settings import load

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer", "host")
READERS = ("yaml", "docker compose", "docker-compose")
PROFILES = {"host_gpu": "gpu", "demo": "demo", "tools": "tools", "nats-box": "tools"}
ONE_SHOT = {"bootstrap", "demo", "tools", "nats-box"}


def run(tool: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GYRE_", "COMPOSE_"))}
    with tempfile.NamedTemporaryFile() as nothing:  # instead of the .env that a user may have here
        command = [*tool.split(), "--env-file", nothing.name, "-f", str(ROOT / "compose.yaml"), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT, env={**env, **environment}
        )


@cache
def installed(tool: str) -> bool:
    if shutil.which(tool.split()[0]) is None:
        return False
    return subprocess.run([*tool.split(), "version"], capture_output=True, timeout=60, check=False).returncode == 0


def skip_without(tool: str) -> None:
    if not installed(tool):
        pytest.skip(f"{tool} is not installed")


@cache
def read(reader: str) -> dict[str, Any]:
    """The document; by a Compose tool, with every profile and variable filled in."""
    if reader == "yaml":
        return yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
    profiles = [flag for name in sorted(set(PROFILES.values())) for flag in ("--profile", name)]
    done = run(reader, *profiles, "config", GYRE_API_KEY="key")
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.fixture(params=READERS)
def document(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param != "yaml":
        skip_without(request.param)
    return read(request.param)


def volumes(service: dict[str, Any]) -> dict[str, str]:
    """Target -> source; the tools write them as text or as a mapping."""
    found = {}
    for one in service.get("volumes", ()):
        source, target = one.split(":")[:2] if isinstance(one, str) else (one["source"], one["target"])
        found[target] = source
    return found


def test_everything_is_there(document: dict[str, Any]) -> None:
    services = document["services"]
    expected = {*SERVICES, "host0", "host1", "nats", "valkey", "bootstrap", *PROFILES} - {"host"}
    assert services.keys() == expected
    for name, service in services.items():
        assert service.get("profiles", []) == ([PROFILES[name]] if name in PROFILES else []), name


def test_each_service_is_watched_and_started_again(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        if name in ONE_SHOT:
            assert service["restart"] == ("on-failure" if name == "bootstrap" else "no"), name
            assert "healthcheck" not in service, name
        else:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][:3] == ["CMD", "python", "/opt/opengyre/deploy/probe.py"], name


def test_they_start_in_order(document: dict[str, Any]) -> None:
    def conditions(name: str) -> dict[str, str]:
        return {on: how["condition"] for on, how in document["services"][name].get("depends_on", {}).items()}

    assert conditions("nats") == {}
    assert conditions("valkey") == {}
    assert conditions("bootstrap") == {"nats": "service_healthy"}
    after = {"bootstrap": "service_completed_successfully", "valkey": "service_healthy"}
    for name in ("gateway", "allocator", "sandbox", "trajectory", "trainer", "host0", "host1", "host_gpu"):
        assert conditions(name) == after, name
    assert conditions("rollout") == {**after, "sandbox": "service_healthy"}
    assert {"gateway", "trainer", "rollout", "host0", "host1"} <= conditions("demo").keys()


def test_images_are_pinned_and_built_from_one_dockerfile(document: dict[str, Any]) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for name, service in document["services"].items():
        tag = service["image"].rpartition(":")[2].rstrip("}")
        assert tag[0].isdigit(), f"{name}: {service['image']}"
        if name == "nats-box":
            continue
        build = service["build"]
        kind = "host" if name.startswith("host") else name
        assert build["args"]["SERVICE"] == kind
        image, target = kind, "learner" if kind in ("host", "trainer", "demo") else "service"
        if name == "host_gpu":
            image, target = "host-gpu", "gpu"
        assert service["image"].startswith(f"opengyre-{image}:")
        assert build["target"] == target, name
        assert f" AS {build['target']}\n" in text
        for argument in build["args"]:
            assert f"ARG {argument}" in text


def test_state_is_kept_in_named_volumes_by_those_who_need_it(document: dict[str, Any]) -> None:
    shared = {name for name, service in document["services"].items() if "state" in volumes(service).values()}
    assert shared == {"trajectory", "trainer", "rollout", "host0", "host1", "host_gpu", "demo"}
    used = {source for service in document["services"].values() for source in volumes(service).values()}
    assert used == document["volumes"].keys(), "a volume without a name is lost with its container"
    for name, service in document["services"].items():
        kept = service.get("environment", {}).get("GYRE_STATE_DIR", "/var/lib/opengyre")
        if name not in ("valkey", "bootstrap", "tools", "nats-box"):
            assert kept in volumes(service), name


def test_only_the_gateway_is_reached_from_outside(document: dict[str, Any]) -> None:
    assert document["networks"]["inside"]["internal"] is True
    for name, service in document["services"].items():
        ports = service.get("ports", [])
        if name == "gateway":
            (port,) = ports
            assert "127.0.0.1" in (port if isinstance(port, str) else port["host_ip"])
        else:
            assert ports == [], name
            assert list(service["networks"]) == ["inside"], name


def test_rights_are_the_least_that_work(document: dict[str, Any]) -> None:
    for name, service in document["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"] is True, name
        assert not service.get("privileged"), name
        security = [one.replace(":", "=", 1) for one in service["security_opt"]]
        assert "no-new-privileges=true" in security, name
        if name == "sandbox":
            assert set(service["cap_add"]) == {"SYS_ADMIN", "SETUID", "SETGID", "SETPCAP"}
            (profile,) = [one for one in security if one.startswith("seccomp=")]
            assert profile.endswith("deploy/seccomp.json")
        else:
            assert "cap_add" not in service, name
            assert "user" not in service, name
            assert len(security) == 1, name


def test_settings_of_every_service_are_known(document: dict[str, Any]) -> None:
    for service in document["services"].values():
        given = {name: str(value) for name, value in service.get("environment", {}).items() if name.startswith("GYRE_")}
        settings = load(environment={n: v for n, v in given.items() if not v.startswith("${")})
        if given:
            assert settings.bus.url == "nats://nats:4222"


def test_a_host_with_a_gpu_serves_by_vllm(document: dict[str, Any]) -> None:
    """A count that is a variable is text, which docker-compose 1.29 refuses; what is compiled is loaded from /tmp."""
    service = document["services"]["host_gpu"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", 1, ["gpu"])
    given = {name: str(value) for name, value in service["environment"].items() if name.startswith("GYRE_HOST__")}
    defaults = {name: re.sub(r"\$\{\w+:-(.*)\}", r"\1", value) for name, value in given.items()}
    settings = load(environment=defaults).host
    assert settings.engine == "vllm"
    assert settings.vllm_tensor_parallel == settings.ranks == device["count"]
    assert service["tmpfs"] == ["/tmp:exec"]
    assert "shm_size" in service
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    assert "GYRE_HOST__VLLM_PYTHON=/opt/vllm/bin/python" in dockerfile
    default = service["build"]["args"]["TORCH_INDEX"]
    assert re.sub(r"\$\{\w+-(.*)\}", r"\1", default) == "", "PyPI's torch is the one for CUDA"


@pytest.mark.parametrize("tool", READERS[1:])
def test_sandboxes_with_images_have_the_rights_for_them_and_no_other_service_has(tool: str) -> None:
    skip_without(tool)
    images = str(ROOT / "deploy" / "compose.images.yaml")
    done = run(tool, "-f", images, "config", GYRE_API_KEY="k", GYRE_IMAGES="/srv/x")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    sandbox = services.pop("sandbox")
    rights = {"CAP_CHOWN": 0, "CAP_DAC_OVERRIDE": 1, "CAP_FOWNER": 3, "CAP_SYS_CHROOT": 18, "CAP_SYS_ADMIN": 21}
    assert {f"CAP_{name}" for name in sandbox["cap_add"]} == {*rights, "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"}
    assert sum(1 << number for number in rights.values()) == machine.MOUNTING
    assert set(sandbox["tmpfs"]) == {"/tmp", "/run"}
    assert sandbox["cap_drop"] == ["ALL"]
    assert volumes(sandbox) == {"/var/lib/sandboxes": "sandbox", "/srv/images": "/srv/x"}
    assert sandbox["environment"]["SANDBOX_IMAGES"] == "1"
    assert load(
        environment={name: value for name, value in sandbox["environment"].items() if name.startswith("GYRE_")}
    ).sandbox.image_roots == ("/srv/images",)
    assert not [name for name, service in services.items() if "cap_add" in service]


@pytest.mark.parametrize("tool", READERS[1:])
def test_without_a_key_it_says_what_to_set(tool: str) -> None:
    skip_without(tool)
    done = run(tool, "config")
    assert done.returncode != 0
    assert "set GYRE_API_KEY" in done.stderr


@pytest.mark.parametrize("tool", READERS[1:])
def test_ports_and_base_image_are_the_users_choice(tool: str) -> None:
    skip_without(tool)
    done = run(tool, "config", GYRE_API_KEY="key", GYRE_PORT="18080", BASE_IMAGE="example/base:1", TORCH_INDEX="")
    services = yaml.safe_load(done.stdout)["services"]
    assert "18080" in str(services["gateway"]["ports"])
    assert services["trainer"]["build"]["args"]["BASE_IMAGE"] == "example/base:1"
    assert services["trainer"]["build"]["args"]["TORCH_INDEX"] == ""
    assert services["gateway"]["environment"]["GYRE_GATEWAY__API_KEYS"] == "key"


def test_the_broker_keeps_what_the_embedded_one_keeps() -> None:
    text = (ROOT / "deploy" / "nats.conf").read_text(encoding="utf-8")
    for line in ("max_payload: 8MB", "sync_interval: always"):
        assert line in text
        assert line in NATS_CONFIG
    assert f"store_dir: {volume_of_nats()}/" in text


def volume_of_nats() -> str:
    (target,) = volumes(read("yaml")["services"]["nats"])
    return target


def test_the_context_holds_what_the_dockerfile_copies() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*", "what is not named stays out: keys, state, virtual environments"
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
    for line in text.splitlines():
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert source.split("/")[0] in allowed, source


def probe(*arguments: str) -> int:
    command = [sys.executable, str(ROOT / "deploy" / "probe.py"), *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


class Answers(http.server.BaseHTTPRequestHandler):
    """200 for /healthz, 503 for all else."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        pass


@pytest.fixture
def guarded(valkey: Any, tmp_path: Path) -> Iterator[Any]:
    """A Valkey that asks for a password."""
    port = free_port()
    command = [*valkey_command(tmp_path / "guarded", port), "--requirepass", "p"]
    server = type(valkey)(command, port, tmp_path / "guarded.log")
    server.start()
    yield server
    server.stop()


def test_the_health_check_tells_health_from_its_absence(valkey: Any, guarded: Any) -> None:
    assert probe(str(valkey.port), "PING") == 0
    assert probe(str(free_port()), "PING") == 1
    assert probe(str(guarded.port), "PING") == 0, "it answers, though not without its password"
    assert probe(str(free_port())) == 1
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert probe(str(server.server_port)) == 0
        assert probe(str(server.server_port), "/readyz") == 1
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize("script", ["entrypoint.sh", "sandbox.sh"])
def test_scripts_are_for_any_posix_shell(script: str) -> None:
    subprocess.run(["sh", "-n", str(ROOT / "deploy" / script)], check=True, timeout=60)


def test_an_image_without_a_service_says_how_it_is_built() -> None:
    done = subprocess.run(
        ["sh", str(ROOT / "deploy" / "entrypoint.sh")],
        capture_output=True, text=True, timeout=60, check=False, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert done.returncode == 64
    assert "--build-arg SERVICE=" in done.stderr
