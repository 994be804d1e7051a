"""Whether a recipe's prompts leave room in the context, asked of the policy's own tokenizer.

Of all tasks those with the shortest and the longest instruction are encoded. Blocking: the tokenizer's package takes
seconds to import.
"""

import importlib.util
from pathlib import Path

from opengyre.cli.recipe import Plan
from opengyre.cli.task_files import TaskFileError
from opengyre.proto.run import Harness
from opengyre.rollout import transcript
from opengyre.rollout.prompt import Renderer
from opengyre.tiny.config import ModelDirectoryError


def check_prompts(recipe: Path, plan: Plan) -> str | None:
    """Raise `TaskFileError` where not even the shortest prompt leaves room for a token; a sentence where the longest
    does not. Nothing is said of an agent that writes its own prompts, or without the policy's tokenizer."""
    tasks = (*plan.tasks, *plan.evaluation)
    model, harness = Path(plan.run.model), plan.run.harness
    if harness.agent != "shell" or not tasks or not model.is_dir():
        return None
    if importlib.util.find_spec("torch") is None:
        return None
    # Not at the top: it imports torch, which other verbs do not wait for.
    from opengyre.chat.open import open_renderer

    try:
        renderer = open_renderer(model)
    except ModelDirectoryError:
        return None  # Perhaps it can be opened where the stack is; who opens it there says why it cannot.
    instructions = sorted((task.instruction for task in tasks), key=len)
    try:
        least, most = (_tokens(renderer, harness, text) for text in (instructions[0], instructions[-1]))
    except ValueError as error:
        raise TaskFileError(f"{recipe}: run.harness makes a prompt that cannot be rendered: {error}") from error
    said = f"run.harness.context_tokens is {harness.context_tokens}"
    if least >= harness.context_tokens:
        raise TaskFileError(
            f"{recipe}: {said}; the shortest prompt has {least} tokens, so allowed are values from {least + 1}"
        )
    if most >= harness.context_tokens:
        return f"{said} and the longest prompt has {most} tokens: an execution without room for a token fails"
    return None


def _tokens(renderer: Renderer, harness: Harness, instruction: str) -> int:
    """Of an execution's first prompt."""
    if harness.prompt == "transcript":
        return len(renderer.begin(transcript.begin(harness.system, harness.shots, instruction)))
    system = [] if harness.system is None else [{"role": "system", "content": harness.system}]
    return len(renderer.render([*system, {"role": "user", "content": instruction}]))
