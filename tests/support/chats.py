"""Renderers of small tokenizers with chat templates as families of models have them."""

import functools
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from opengyre.chat.codec import Codec
from opengyre.chat.hf import HfRenderer, template_of

CHATML: Final = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""SmolLM2's."""

LLAMA3: Final = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
"""Like Llama 3's: a header, text without white space around it, no line after the end of a turn."""

QWEN: Final = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" + tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}\n</tool_call><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if thought and loop.index0 > ns.last_query %}
            {{- '<think>\n' + thought + '\n</think>\n\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""Like Qwen 3's: tells of tools, groups their answers, drops thoughts of turns before the last question."""

MOVING: Final = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}"
    "{% if loop.last %}{{ '[now] ' }}{% endif %}{{ '[q] ' + message.content + ' [/q]' }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak here') }}{% endif %}{% endfor %}"
)
"""Marks the last question, so what stands before a new one changes; knows neither system prompt nor tools."""

TEMPLATES: Final = {"chatml": CHATML, "llama3": LLAMA3, "qwen": QWEN, "moving": MOVING}
SPECIALS: Final = {
    "chatml": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "qwen": ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    "moving": ("<s>", "</s>"),
}
"""Of each family: the first is the beginning of a text, the second is its end."""
ADDED: Final = ("<tool_call>", "</tool_call>", "<think>", "</think>")
"""Tokens of their own, though not special, in Qwen's tokenizer."""
TEXT: Final = (
    "system user assistant tool the cat sat on a mat\n\n and the cat ate the rat; write a word into a file. alpha beta"
)


@functools.cache
def bpe(family: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS[family]],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    if family == "qwen":
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ADDED])
    return tokenizer


@functools.cache
def fast(family: str) -> Any:
    """The tokenizer as `transformers` has it, the reference."""
    from transformers import PreTrainedTokenizerFast

    first, second, *_ = SPECIALS[family]
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe(family), bos_token=first, eos_token=second, chat_template=TEMPLATES[family]
    )


@functools.cache
def renderer(family: str) -> HfRenderer:
    tokenizer = fast(family)
    codec = Codec(tokenizer.backend_tokenizer)
    return HfRenderer(codec, template_of(tokenizer, codec), [tokenizer.eos_token_id])
