"""Services as processes of their own, and an untrained policy for them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from opengyre.proto import subjects
from opengyre.proto.weights import WeightsPublished
from opengyre.tiny.checkpoint import save_pretrained
from opengyre.tiny.config import TinyConfig
from opengyre.tiny.model import TinyModel
from opengyre.weights.write import version_directory, write_version
from support.rollout_fakes import Stack


@contextlib.contextmanager
def process(stack: Stack, service: str, **settings: str) -> Iterator[subprocess.Popen[bytes]]:
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GYRE_STATE_DIR": str(stack.folder / "state"),
        "GYRE_BUS__URL": stack.nats_url,
        "GYRE_SANDBOX__ALLOW_UNISOLATED": "true",
        **{f"GYRE_{name}": value for name, value in settings.items()},
    }
    with (stack.folder / f"{service}-{len(list(stack.folder.iterdir()))}.log").open("wb") as out:
        running = subprocess.Popen([sys.executable, "-m", f"opengyre.{service}"], env=env, stdout=out, stderr=out)
    try:
        yield running
    finally:
        running.terminate()
        try:
            running.wait(60)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait(5)


async def publish_version(stack: Stack) -> None:
    """Version 0, of a policy that was never trained: what it says is noise, what becomes of it is not."""
    tokenizer = stack.tokenizer
    model = TinyModel(TinyConfig(tokenizer.vocab_size, bos_token_id=tokenizer.bos_id, eos_token_id=tokenizer.end_id), 1)
    save_pretrained(model, stack.model)
    manifest = write_version(
        {name: parameter.detach() for name, parameter in model.named_parameters()},
        version_directory(stack.folder / "state" / "weights" / "r", 0),
        run="r",
        version=0,
        parent=None,
        step=0,
        extra={"config.json": (stack.model / "config.json").read_bytes()},
    )
    await stack.bus.publish(subjects.weights("r", "published"), WeightsPublished(run="r", manifest=manifest))
