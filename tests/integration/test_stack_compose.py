"""compose.yaml, as the Compose tool itself understands it."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer"}


def tool() -> list[str]:
    """The Compose tool of this machine; skips where there is none."""
    if shutil.which("docker"):
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=30, check=False)
        if done.returncode == 0:
            return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    pytest.skip("neither `docker compose` nor docker-compose is installed")


def config(*profiles: str, **environment: str) -> dict[str, Any]:
    flags = [flag for profile in profiles for flag in ("--profile", profile)]
    done = subprocess.run(
        [*tool(), "-f", str(ROOT / "compose.yaml"), *flags, "config"],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


def test_every_service_is_there_ordered_and_watched() -> None:
    services = config()["services"]
    assert services.keys() >= SERVICES | {"nats", "valkey", "bootstrap", "host0", "host1"}
    for name in (*SERVICES, "host0", "host1"):
        service = services[name]
        assert service["depends_on"]["bootstrap"]["condition"] == "service_completed_successfully"
        environment = service["environment"]
        assert environment["GYRE_BUS__URL"] == "nats://nats:4222"
        assert environment["GYRE_HTTP__ADVERTISE"] == name
        assert service["build"]["args"]["SERVICE"] == name.rstrip("01")
    assert services["bootstrap"]["depends_on"]["nats"]["condition"] == "service_healthy"
    for name in ("nats", "valkey"):
        assert services[name]["healthcheck"]["test"][0] == "CMD"
    shared = {
        name for name in services if any("state:/state" in str(v) or _is_state(v) for v in _volumes(services, name))
    }
    assert shared >= {"trainer", "host0", "host1", "rollout"}


def _volumes(services: dict[str, Any], name: str) -> list[Any]:
    return services[name].get("volumes", [])


def _is_state(volume: Any) -> bool:
    return isinstance(volume, dict) and volume.get("source") == "state" and volume.get("target") == "/state"


def test_profiles_add_what_they_say() -> None:
    for profile, name in (("demo", "demo"), ("tools", "nats-box"), ("gpu", "gpu0")):
        services = config(profile)["services"]  # the older tool shows those of other profiles as well
        assert [n for n, service in services.items() if profile in service.get("profiles", ())] == [name]
    gpu = config("gpu")["services"]
    devices = gpu["gpu0"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]


def test_the_base_image_is_an_argument() -> None:
    services = config(BASE_IMAGE="example/base:1", GYRE_PORT="18080")["services"]
    assert services["trainer"]["build"]["args"]["BASE_IMAGE"] == "example/base:1"
    assert "18080" in str(services["gateway"]["ports"])


def test_the_dockerfile_builds_what_compose_asks_for() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    for argument in config()["services"]["gateway"]["build"]["args"]:
        assert f"ARG {argument}=" in text
