"""What a client remembers of earlier stages, and what it draws from that."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.prototypes import memorise, recall

X = torch.tensor([[1.0, 0.0], [3.0, 0.0], [10.0, 4.0], [10.0, 8.0]])
LABELS = torch.tensor([2, 2, 7, 7])


def remembered(*stages: tuple[torch.Tensor, torch.Tensor]) -> dict[str, np.ndarray[Any, Any]]:
    state: dict[str, np.ndarray[Any, Any]] = {}
    for stage, (x, labels) in enumerate(stages):
        memorise(state, stage, x, labels)
    return state


def test_a_prototype_is_the_mean_of_a_class_and_its_spread_is_pooled_over_the_classes_of_the_stage() -> None:
    found = recall(remembered((X, LABELS)), 1)

    assert found is not None
    assert found.classes_P.tolist() == [2, 7] and found.counts_P.tolist() == [2, 2]
    assert found.means_PD.tolist() == [[2.0, 0.0], [10.0, 6.0]]
    # Squared deviations (1, 1, 0, 0) and (0, 0, 4, 4), four images less two means.
    torch.testing.assert_close(found.deviations_SD, torch.tensor([[1.0, 2.0]]))


def test_only_earlier_stages_are_recalled_and_each_keeps_its_own_prototype_of_a_class() -> None:
    state = remembered((X, LABELS), (X + 5, LABELS), (X - 5, LABELS))

    assert recall(state, 0) is None
    found = recall(state, 2)

    assert found is not None
    assert found.classes_P.tolist() == [2, 7, 2, 7] and found.stages_P.tolist() == [0, 0, 1, 1]
    assert found.means_PD[:, 0].tolist() == [2.0, 10.0, 7.0, 15.0]


def test_a_stage_without_images_is_left_out() -> None:
    state: dict[str, np.ndarray[Any, Any]] = {}
    memorise(state, 1, X, LABELS)

    assert recall(state, 1) is None
    found = recall(state, 3)
    assert found is not None and found.stages_P.tolist() == [0, 0] and len(found.deviations_SD) == 1


def test_a_stage_is_memorised_once() -> None:
    state = remembered((X, LABELS))
    before = {name: value.copy() for name, value in state.items()}

    memorise(state, 0, X + 1, LABELS)

    assert state.keys() == before.keys() and all(np.array_equal(v, before[n]) for n, v in state.items())


def test_a_map_is_remembered_number_by_number() -> None:
    maps = torch.cat([X, X + 1], dim=1).view(4, 2, 1, 2)

    one, other = recall(remembered((maps, LABELS)), 1), recall(remembered((maps.flatten(1), LABELS)), 1)

    assert one is not None and other is not None
    assert torch.equal(one.means_PD, other.means_PD) and torch.equal(one.deviations_SD, other.deviations_SD)


def test_no_image_is_kept() -> None:
    state = remembered((X, LABELS))

    assert sum(value.size for value in state.values()) == 2 + 2 + 2 * 2 + 2
    assert not any(np.array_equal(row, image) for row in state["prototypes/0/means"] for image in X.numpy())


def test_one_image_per_class_has_no_spread() -> None:
    found = recall(remembered((X[[0, 2]], LABELS[[0, 2]])), 1)

    assert found is not None
    x, labels = found.draw(20, torch.Generator().manual_seed(0))
    assert {(tuple(row), int(label)) for row, label in zip(x.tolist(), labels, strict=True)} == {
        ((1.0, 0.0), 2),
        ((10.0, 4.0), 7),
    }


@given(counts=st.lists(st.integers(1, 30), min_size=2, max_size=4), seed=st.integers(0, 1000))
def test_classes_are_drawn_as_often_as_they_were_met_around_their_means(counts: list[int], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.full((count,), label) for label, count in enumerate(counts)])
    found = recall(remembered((10.0 * labels.unsqueeze(1) + torch.randn(len(labels), 3, generator=source), labels)), 1)
    assert found is not None

    x, drawn = found.draw(4000, source)

    for label, count in enumerate(counts):
        mine = x[drawn == label]
        assert abs(len(mine) / 4000 - count / len(labels)) < 0.05
        offset = (mine.mean(0) - found.means_PD[label]).abs()
        assert bool((offset < 6 * found.deviations_SD[0] / len(mine) ** 0.5 + 1e-4).all())


def test_the_same_generator_state_gives_the_same_features() -> None:
    found = recall(remembered((X, LABELS)), 1)
    assert found is not None

    first, second = (found.draw(9, torch.Generator().manual_seed(3)) for _ in range(2))

    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
