"""Chats as token ids for any model of `transformers`: its tokenizer, its chat template, and tool calls as text."""
