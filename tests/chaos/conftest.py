"""A policy for whole stacks, made once for the suite."""

from pathlib import Path

import pytest

from support.stack import make_policy


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))
