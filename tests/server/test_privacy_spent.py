"""Epsilon is reported for what a run really sent."""

from __future__ import annotations

import pytest

from edgeduet_server.privacy_spent import privacy_spent
from edgeduet_shared.config import PrivacyConfig
from edgeduet_shared.privacy import epsilon


def rounds(*answers: tuple[int, ...]) -> list[dict[str, object]]:
    return [{"event": "round", "clients": [{"client": client} for client in clients]} for clients in answers]


def test_without_noise_there_is_nothing_to_report() -> None:
    assert privacy_spent(PrivacyConfig(), rounds((0, 1))) is None


def test_the_client_that_answered_most_often_decides() -> None:
    spent = privacy_spent(PrivacyConfig(digest_noise=8.0), rounds((0, 1), (1,), (0, 1), ()))

    assert spent is not None
    assert spent["releases"] == 3
    assert spent["epsilon_digest"] == pytest.approx(epsilon(8.0, 3, 1e-5))
    assert "epsilon_update" not in spent


def test_the_summary_says_what_is_not_covered() -> None:
    spent = privacy_spent(PrivacyConfig(update_clip=1.0, update_noise=4.0), rounds((0,)))

    assert spent is not None
    assert "have no noise" in spent["summary"]
