"""Any Hugging Face model directory as the policy of a run: opened by its layout, trained on the tokens of its chats."""

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

from opengyre.chat.hf import HfRenderer
from opengyre.chat.open import open_renderer
from opengyre.policy.describe import describe
from opengyre.policy.open import open_policy
from opengyre.proto import subjects
from opengyre.proto.group import GroupReady, Member, Sequence, Span
from opengyre.proto.run import Dispatch, Optimization, RunSpec
from opengyre.proto.weights import WeightsPublished
from opengyre.rollout.models import Models
from opengyre.shared.blobs import Blobs
from opengyre.shared.bus import Bucket, Bus, RetryLater
from opengyre.shared.settings import CacheSettings
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.tokenizer import TinyTokenizer
from support import eventually
from support.chats import fast
from support.models import LLAMA, save_stock
from support.trainer_cells import cells, through
from support.trainer_fakes import RUN, events, offer, trainer

pytestmark = pytest.mark.torch
G = 4
CHAT = [{"role": "user", "content": "write a word into a file"}]
SEEN = [{"role": "tool", "content": "the cat"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = save_stock(tmp_path / "model", {**LLAMA, "vocab_size": 400})
    fast("chatml").save_pretrained(directory)
    return directory


@pytest.fixture
async def blobs(tmp_path: Path) -> AsyncIterator[Blobs]:
    async with Blobs(tmp_path / "state" / "blobs", CacheSettings()) as store:
        yield store


def group(render: HfRenderer) -> GroupReady:
    """Executions of two turns each, with the answer of a tool between them, as a rollout records them."""
    rng = random.Random(0)
    name = f"{RUN}-g000000"
    members: list[Member] = []
    for place in range(G):
        tokens = render.render(CHAT)
        spans: list[Span] = []
        for turn in range(2):
            sampled = [*(rng.randrange(10, 300) for _ in range(4)), render.stop_token_ids[0]]
            start, size = len(tokens), len(sampled)
            spans.append(
                Span(start=start, end=start + size, logprobs=(-3.0,) * size, versions=(0,) * size, temperature=1.0)
            )
            tokens += sampled
            if turn == 0:
                tokens += render.render_suffix(SEEN) or []
        members.append(
            Member(
                execution=f"{name}-e{place:02d}", score=float(place % 2), advantage=1.0 - 2 * (place % 2),
                sequences=(Sequence(tokens=tuple(tokens), spans=tuple(spans)),), trained_tokens=10,
                path_tokens=len(tokens),
            )
        )  # fmt: skip
    names = tuple(member.execution for member in members)
    return GroupReady(run=RUN, group=name, task="t0", version=0, members=tuple(members), executions=names, group_size=G)


async def test_an_update_is_trained_on_the_tokens_of_its_chats(
    bus: Bus, blobs: Blobs, model: Path, tmp_path: Path
) -> None:
    render = open_renderer(model)
    assert isinstance(render, HfRenderer)
    spec = RunSpec(
        run=RUN, model=str(model), updates=1, dispatch=Dispatch(phi=0, mu=1, batch_groups=1, group_size=G),
        optimization=Optimization(learning_rate=0.01),
    )  # fmt: skip
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, spec)
    assert (await Models(bus).renderer(RUN)).stop_token_ids == render.stop_token_ids

    async def published() -> list[WeightsPublished]:
        found = await events(bus, subjects.WEIGHTS, subjects.weights(RUN, "published"))
        return [event for event in found if event.manifest.version == 1]

    async with trainer(bus, blobs, tmp_path, "t0"), cells(bus, blobs, tmp_path, through):
        await offer(bus, group(render))
        await eventually(published)
    [event] = await published()
    version = Path(event.manifest.directory)
    [done] = await events(bus, subjects.UPDATES, subjects.update(RUN, "committed"))
    assert done.skipped is None
    assert done.stats.unique_tokens < done.stats.path_tokens  # they share their prompt
    before, after = open_policy(model).tensors(), open_policy(version).tensors()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    # A version is a model directory with the same tokenizer and template.
    again = open_renderer(version)
    assert again.render([*CHAT, *SEEN]) == render.render([*CHAT, *SEEN])
    assert describe(version).chat_template


async def test_the_layout_says_who_renders_and_what_is_missing_is_waited_for(bus: Bus, model: Path) -> None:
    render = open_renderer(model)
    assert (render.vocab_size, render.stop_token_ids) == (400, (fast("chatml").eos_token_id,))
    assert render.render(CHAT) == fast("chatml").apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False
    )
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelDirectoryError, match=r"tokenizer.json: no tokenizer can be made of it: "):
        open_renderer(model)
    (model / "tokenizer.json").unlink()
    await Bucket(bus, subjects.KV_RUNS, RunSpec).put(RUN, RunSpec(run=RUN, model=str(model)))
    with pytest.raises(RetryLater, match=r"tokenizer.json does not exist"):
        await Models(bus).renderer(RUN)
    TinyTokenizer.train(["abc"], 262).save(model)
    assert isinstance(await Models(bus).renderer(RUN), TinyTokenizer)


def test_stops_come_from_all_files_and_a_model_without_a_template_takes_texts_only(model: Path) -> None:
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert open_renderer(model).stop_token_ids == (fast("chatml").eos_token_id, 7, 9)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        path = model / name
        if name.endswith("json") and path.exists():
            fields = json.loads(path.read_text())
            fields.pop("chat_template", None)
            path.write_text(json.dumps(fields))
        else:
            path.unlink(missing_ok=True)
    render = open_renderer(model)
    assert render.begin("the cat") == fast("chatml").encode("the cat")
    assert render.stop_token_ids[:2] == (7, 9)
    assert not describe(model).chat_template
    with pytest.raises(ValueError, match="the model has no chat template, so it takes text prompts only"):
        render.render(CHAT)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": "end"}))
    with pytest.raises(ModelDirectoryError, match=r"eos_token_id is 'end' in generation_config.json or config.json"):
        open_renderer(model)
