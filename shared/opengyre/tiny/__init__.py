"""The tiny policy: a Llama-type decoder of about half a million parameters, its tokenizer and its engine."""
