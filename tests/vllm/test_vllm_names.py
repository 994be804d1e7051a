"""The names that a run may use are those of the vLLM that is installed."""

import ast
import os
import subprocess
from pathlib import Path

from opengyre.proto.engine_names import KV_DTYPES, QUANTIZATIONS
from opengyre.shared.vllm import interpreter


def literal(package: Path, module: str, name: str) -> list[str]:
    """The values of a `Literal` of that name; read, since an import of vLLM takes ten seconds."""
    for node in ast.walk(ast.parse((package / module).read_text())):
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            assert isinstance(node.value, ast.Subscript)
            return list(ast.literal_eval(node.value.slice))
    raise AssertionError(f"{module} has no {name}")


def test_names_are_those_of_the_installed_vllm() -> None:
    code = "import importlib.util; print(importlib.util.find_spec('vllm').submodule_search_locations[0])"
    python = interpreter(os.environ.get("GYRE_HOST__VLLM_PYTHON"))
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    package = Path(found.stdout.strip())
    formats = literal(package, "config/cache.py", "CacheDType")
    assert [name for name in KV_DTYPES if name != "float32"] == [name for name in formats if name != "auto"]
    methods = literal(package, "model_executor/layers/quantization/__init__.py", "QuantizationMethods")
    assert list(QUANTIZATIONS) == methods
