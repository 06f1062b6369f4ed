"""FedCLIP's attention head."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_shared.head import AttentionHead


@given(seed=st.integers(0, 2**31), width=st.integers(2, 6))
def test_the_head_computes_its_formula(seed: int, width: int) -> None:
    head = AttentionHead(width).requires_grad_(False)
    source = torch.Generator().manual_seed(seed)
    for parameter in head.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=source))
    embedding = torch.randn(3, width, generator=source)

    result = head(embedding).numpy()

    value = {name: parameter.numpy().astype(np.float64) for name, parameter in head.named_parameters()}
    for row, given_row in zip(result, embedding.numpy().astype(np.float64), strict=True):
        x = given_row / np.linalg.norm(given_row) * np.sqrt(width)
        scores = (
            value["output_weight"] @ np.tanh(value["hidden_weight"] @ x + value["hidden_bias"]) + value["output_bias"]
        )
        attention = np.exp(scores - scores.max())
        np.testing.assert_allclose(row, given_row * width * attention / attention.sum(), rtol=1e-3, atol=1e-4)


def test_a_fresh_head_is_the_identity() -> None:
    head = AttentionHead(32)
    embedding = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    result = torch.func.functional_call(head, head.initial(torch.Generator().manual_seed(0)), (embedding,))

    assert torch.equal(result, embedding)
