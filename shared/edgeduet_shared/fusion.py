"""Cross-attention fusion of one image feature over local and dispatched prompts (fed-duet.md 1.6).

For each image and class the gate decides how much the class's text feature under the local prompt
and under each of the M dispatched prompts says about it. The block is pFedMoAP's (Luo et al., ICLR
2025)::

    pool(v) = every stride-th coordinate of v
    Q = pool(z_i)    K = V = [pool(t_c), pool(u_1c), ..., pool(u_Mc)]
    r_ic = W_o softmax(10 * W_q Q . W_k K) W_v V          (heads split the coordinates)
    shared(i, c) = tau * <pool(z_i), r_ic>
    final(i, c) = mix * tau * <z_i, t_c> + (1 - mix) * shared(i, c)

Scores are multiplied by the constant 10 instead of 1/sqrt(d).

Where we differ: the published code starts the four projections at random, so that an untrained
fusion adds noise logits. Here W_q, W_k and W_v start at the identity and W_o at D/d times the
identity (d of D coordinates are kept, so <pool(z), pool(t)> is about d/D of <z, t>), each plus
N(0, 0.01^2) noise. An untrained fusion is then a nearly uniform average of the prompts' own logits at
the right temperature, and training only has to learn the deviations.

Shape suffixes: B images, C classes, M dispatched prompts, P = M + 1 prompts with the local one first,
D joint width, d kept width, h heads, e = d / h.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeduet_shared.config import FusionConfig
from edgeduet_shared.errors import ConfigError

SCORE_SCALE = 10.0
_INITIAL_NOISE = 0.01


class Projection(nn.Module):
    """A square linear map with bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x W^T + b``."""
        return functional.linear(x, self.weight, self.bias)


class Fusion(nn.Module):
    """The trainable gate.

    Args:
        embed_dim: width D of the joint space.
        config: stride and heads; ``heads`` must divide the ceil(D / stride) kept coordinates.
    """

    def __init__(self, embed_dim: int, config: FusionConfig) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.stride = config.stride
        self.heads = config.heads
        self.width = len(range(0, embed_dim, config.stride))
        if self.width % self.heads:
            fitting = [heads for heads in range(1, self.width + 1) if self.width % heads == 0]
            raise ConfigError(
                f"model.fusion.heads={self.heads} does not divide the {self.width} coordinates that "
                f"model.fusion.stride={self.stride} keeps of {embed_dim}; use one of {fitting}"
            )
        self.query = Projection(self.width)
        self.key = Projection(self.width)
        self.value = Projection(self.width)
        self.output = Projection(self.width)

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh values: identity plus small noise, see the module docstring."""
        fresh = {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}
        for name in fresh:
            if name.endswith("weight"):
                noise = _INITIAL_NOISE * torch.randn(self.width, self.width, generator=generator)
                fresh[name] = torch.eye(self.width) + noise
        fresh["output.weight"] = fresh["output.weight"] * (self.embed_dim / self.width)
        return fresh

    def pool(self, features: Tensor) -> Tensor:
        """Keep every stride-th coordinate of the last axis."""
        return features[..., :: self.stride]

    def forward(self, z_BD: Tensor, t_CD: Tensor, u_MCD: Tensor) -> tuple[Tensor, Tensor]:
        """Return <pool(z), r> without temperature (B, C), and attention (B, C, P) averaged over heads."""
        prompts_PCd = self.pool(torch.cat([t_CD.unsqueeze(0), u_MCD]))
        pooled_Bd = self.pool(z_BD)
        split = (self.heads, self.width // self.heads)
        query_Bhe = self.query(pooled_Bd).unflatten(-1, split)
        key_PChe = self.key(prompts_PCd).unflatten(-1, split)
        value_PChe = self.value(prompts_PCd).unflatten(-1, split)
        scores_BhCP = torch.einsum("bhe,pche->bhcp", query_Bhe, key_PChe) * SCORE_SCALE
        attention_BhCP = scores_BhCP.softmax(-1)
        # <pool(z), W_o r + b_o> = <W_o^T pool(z), r> + <pool(z), b_o>: saves the (B, C, d) tensor of r.
        reader_Bhe = (pooled_Bd @ self.output.weight).unflatten(-1, split)
        said_BhCP = torch.einsum("bhe,pche->bhcp", reader_Bhe, value_PChe)
        shared_BC = (attention_BhCP * said_BhCP).sum(-1).sum(1) + (pooled_Bd @ self.output.bias).unsqueeze(-1)
        return shared_BC, attention_BhCP.mean(1)
