"""vLLM's server, started once for all tests."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from opengyre.host.vllm import VllmEngine
from opengyre.shared.vllm import VllmMissingError, interpreter
from support.vllm_models import Models, settings


def missing() -> str | None:
    try:
        interpreter(os.environ.get("GYRE_HOST__VLLM_PYTHON"))
    except VllmMissingError as error:
        return str(error)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    why = missing()
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.xdist_group("vllm"))
            if why is not None:
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what it compiles for the server."""
    return tmp_path_factory.mktemp("compiled")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def server(models: Models, compiled: Path) -> AsyncIterator[VllmEngine]:
    """Running, with the old weights."""
    engine = VllmEngine(settings())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(compiled))
        await engine.wake(models.paths["old"], 0)
    await engine.resume()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(server: VllmEngine, models: Models) -> VllmEngine:
    """Running, with the old weights under a version of their own, and no call in flight."""
    version = server.stats().version + 1
    await server.pause()
    await server.load(models.paths["old"], version)
    await server.resume()
    return server
