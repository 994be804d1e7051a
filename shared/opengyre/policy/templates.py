"""The chat template of a model directory, from its files alone: whether there is one, and whether it can be parsed.

Nothing of a template is run here.
"""

import importlib.util
from pathlib import Path
from typing import Any, Final

from opengyre.policy.directory import TOKENIZER_FILE, read_json
from opengyre.tiny.config import ModelDirectoryError
from opengyre.tiny.template import SPECIALS

TOKENIZER_CONFIG_FILE: Final = "tokenizer_config.json"
TEMPLATE_FILE: Final = "chat_template.jinja"


def templates(directory: Path) -> dict[Path, tuple[str, ...]]:
    """File -> the templates in it that say something; raises `ModelDirectoryError`."""
    found: dict[Path, tuple[str, ...]] = {}
    own = directory / TEMPLATE_FILE
    if own.is_file():
        try:
            found[own] = (own.read_text(encoding="utf-8"),)
        except (OSError, UnicodeDecodeError) as error:
            raise ModelDirectoryError(f"{own} is no text: {error}") from error
    path = directory / TOKENIZER_CONFIG_FILE
    if path.is_file():
        said: Any = read_json(path).get("chat_template")
        # By name, in a list, where a model has several.
        many = [one.get("template") for one in said if isinstance(one, dict)] if isinstance(said, list) else [said]
        found[path] = tuple(one for one in many if isinstance(one, str))
    return {file: kept for file, texts in found.items() if (kept := tuple(text for text in texts if text.strip()))}


def has_template(directory: Path) -> bool:
    """Whether chats can be rendered for the model: it has a template, or the markers of the tiny policy's own."""
    if templates(directory):
        return True
    added = read_json(directory / TOKENIZER_FILE).get("added_tokens")
    tokens = {token.get("content") for token in added if isinstance(token, dict)} if isinstance(added, list) else set()
    return tokens >= set(SPECIALS)


def check_template(directory: Path) -> None:
    """Raise `ModelDirectoryError` for a template that cannot be parsed."""
    if importlib.util.find_spec("jinja2") is None:
        return  # Who renders chats says what to install.
    from jinja2 import TemplateSyntaxError, nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}`, by which templates of `transformers` mark what the assistant says."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as a variable of instances

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(extensions=[Generation, "jinja2.ext.loopcontrols"])
    for file, texts in templates(directory).items():
        for text in texts:
            try:
                environment.parse(text)
            except TemplateSyntaxError as error:
                raise ModelDirectoryError(
                    f"{file}: the chat template cannot be parsed: line {error.lineno}: {error.message}; allowed is a "
                    "Jinja template"
                ) from error
