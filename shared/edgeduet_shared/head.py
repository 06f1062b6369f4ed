"""FedCLIP's attention head on the image embedding.

Lu, Hu, Wang and Xie 2023 (arXiv 2302.13485) train a small attention adapter ``att(I)`` on the frozen
image feature and use ``att(I) * I``, ``att`` ending in a softmax. Here::

    x = I / |I| * sqrt(D)        att = D * softmax(W_2 tanh(W_1 x + b_1) + b_2)        out = att * I

Where we differ: W_2 and b_2 start at zero and the softmax is multiplied by D, so that the head starts as
the exact identity (the published head starts at a random mask); the input is scaled to norm sqrt(D) so
that tanh sees coordinates of order 1; there is no batch normalisation, whose running statistics
would have to be averaged between clients.

Shape suffixes: B images, D joint width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgeduet_shared.adapters import kaiming_uniform


class AttentionHead(nn.Module):
    """Coordinate-wise attention on the image embedding (D -> D)."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.embed_dim = embed_dim
        self.hidden_weight = nn.Parameter(torch.zeros(embed_dim, embed_dim))
        self.hidden_bias = nn.Parameter(torch.zeros(embed_dim))
        self.output_weight = nn.Parameter(torch.zeros(embed_dim, embed_dim))
        self.output_bias = nn.Parameter(torch.zeros(embed_dim))

    def initial(self, generator: torch.Generator) -> dict[str, Tensor]:
        """Fresh values: Kaiming-uniform W_1, everything else zero."""
        fresh = {name: torch.zeros(parameter.shape) for name, parameter in self.named_parameters()}
        fresh["hidden_weight"] = kaiming_uniform((self.embed_dim, self.embed_dim), generator)
        return fresh

    def forward(self, embedding_BD: Tensor) -> Tensor:
        """Weigh the coordinates of a raw or normalised embedding; the result is not normalised."""
        scaled_BD = functional.normalize(embedding_BD, dim=-1) * math.sqrt(self.embed_dim)
        hidden_BD = functional.linear(scaled_BD, self.hidden_weight, self.hidden_bias).tanh()
        attention_BD = functional.linear(hidden_BD, self.output_weight, self.output_bias).softmax(-1)
        return embedding_BD * (attention_BD * self.embed_dim)
