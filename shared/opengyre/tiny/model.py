"""The tiny policy for training: a Llama-type decoder with Hugging Face's parameter names and no cache.

Sequences are padded on the right: attention is causal, so padding changes nothing before it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the common name

from opengyre.tiny import rope
from opengyre.tiny.config import TinyConfig


class Norm(nn.Module):
    """Root-mean-square norm."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, size = x.shape
        shape = (batch, length, self.heads, self.head_dim)
        q = rope.rotate(self.q_proj(x).view(shape).transpose(1, 2), cos, sin)
        k = rope.rotate(self.k_proj(x).view(shape).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, size))


class Mlp(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope.tables(config.head_dim, config.max_position_embeddings, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.norm(x)


class TinyModel(nn.Module):
    """The policy. Its output embedding is its input embedding."""

    def __init__(self, config: TinyConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if "o_proj" in name or "down_proj" in name else 0.02
                nn.init.normal_(parameter, std=std, generator=generator)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Last hidden states `[batch, length, hidden]` of `tokens` (`[batch, length]`, int64)."""
        return self.model(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Next-token logits `[..., vocab]` of hidden states `[..., hidden]`."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))
