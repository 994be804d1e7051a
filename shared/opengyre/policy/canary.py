"""Log-probs of a policy's canary, by its own forward."""

import torch

from opengyre.policy.open import Policy
from opengyre.weights.canary import encode, prompts_for


def canary_of(policy: Policy) -> bytes | None:
    """Content of the canary's file; None where log-probs are not finite."""
    prompts = prompts_for(policy.vocabulary, policy.context)
    tokens = torch.tensor(prompts)
    with torch.no_grad():
        # One prompt at a time: with a large vocabulary all logits together are large.
        rows = [_scored(policy, one[None])[0] for one in tokens.to(next(policy.model.parameters()).device)]
    return encode(prompts, [row.tolist() for row in rows])


def _scored(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """`[1, length - 1]` log-probs of all tokens but the first."""
    answer = policy.model(tokens)
    logits = answer if isinstance(answer, torch.Tensor) else answer.logits  # the tiny decoder's, or transformers'
    return torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
