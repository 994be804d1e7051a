"""What the layout promises: who may import whom, and how large a module may be."""

import ast
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("gateway", "allocator", "rollout", "sandbox", "trajectory", "trainer", "host")
SOURCES = sorted(path for root in ("services", "proto", "shared") for path in (ROOT / root).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def package(path: Path) -> str:
    """`rollout` for services/opengyre/rollout/x.py."""
    return path.relative_to(ROOT).parts[2]


def test_no_init_hides_the_other_source_roots() -> None:
    for root in ("services", "proto", "shared"):
        assert not (ROOT / root / "opengyre" / "__init__.py").exists()


def test_every_package_is_typed_and_named_once() -> None:
    names = [path.name for root in ("services", "proto", "shared") for path in (ROOT / root / "opengyre").iterdir()]
    names = [name for name in names if name != "__pycache__"]
    assert len(names) == len(set(names))
    for root in ("services", "proto", "shared"):
        for folder in (ROOT / root / "opengyre").iterdir():
            if folder.name != "__pycache__":
                assert (folder / "py.typed").exists(), folder


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_imports_no_other_service(service: str) -> None:
    forbidden = {f"opengyre.{other}" for other in (*SERVICES, "cli") if other != service}
    for path in SOURCES:
        if package(path) == service:
            wrong = {name for name in imports(path) if any(name == f or name.startswith(f"{f}.") for f in forbidden)}
            assert not wrong, path


def test_proto_and_shared_import_no_service() -> None:
    forbidden = {f"opengyre.{service}" for service in (*SERVICES, "cli")}
    for path in SOURCES:
        if path.relative_to(ROOT).parts[0] in ("proto", "shared"):
            wrong = {name for name in imports(path) if any(name == f or name.startswith(f"{f}.") for f in forbidden)}
            assert not wrong, path


def test_only_the_bus_knows_nats() -> None:
    for path in SOURCES:
        if "/shared/opengyre/shared/bus/" not in path.as_posix():
            assert not {name for name in imports(path) if name.split(".")[0] == "nats"}, path


def test_modules_stay_small() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES if path.stat().st_size}
    too_long = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 500}
    assert not too_long
    assert statistics.median(sizes.values()) < 200


def test_command_line_and_rollout_start_without_torch() -> None:
    """It is an extra, and takes seconds to import; what a module imports in a function is not of the start."""
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts[1:]): path for path in SOURCES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    found: set[str] = set()
    waiting = {"opengyre.cli.main", "opengyre.rollout.__main__"}
    while waiting:
        found.add(name := waiting.pop())
        for node in ast.parse(modules[name].read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                named = {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            else:
                continue
            assert not {one for one in named if one.split(".")[0] in ("torch", "transformers", "safetensors")}, name
            named |= {one.rpartition(".")[0] for one in named}  # a package before its modules
            waiting |= named.intersection(modules) - found
    assert "opengyre.cli.bench_router" in found
