"""What the noise of a run bought: epsilon per client, from the rounds it answered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from edgeduet_shared.config import PrivacyConfig
from edgeduet_shared.privacy import epsilon


def privacy_spent(config: PrivacyConfig, events: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return epsilon at ``config.delta`` for the client that answered most often; None where noise is off.

    Digests and updates are accounted one by one. What else a reply carries (loss, accuracy, number of
    examples, attention per prompt) has no noise and is not covered; the summary says so.
    """
    if config.digest_noise == 0 and config.update_noise == 0:
        return None
    answered: Counter[int] = Counter()
    for event in events:
        if event.get("event") == "round":
            answered.update(int(client["client"]) for client in event.get("clients", ()))
    releases = max(answered.values(), default=0)
    spent: dict[str, Any] = {"releases": releases, "delta": config.delta}
    parts = []
    for name, multiplier in (("digest", config.digest_noise), ("update", config.update_noise)):
        if multiplier > 0:
            spent[f"epsilon_{name}"] = epsilon(multiplier, releases, config.delta)
            parts.append(f"epsilon {spent[f'epsilon_{name}']:.3g} on {name}s")
    summary = f"{', '.join(parts)} at delta {config.delta:g} after {releases} rounds"
    return {**spent, "summary": f"{summary}; loss, accuracy, counts and attention in replies have no noise"}
