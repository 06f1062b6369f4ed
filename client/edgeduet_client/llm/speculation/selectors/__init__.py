"""Rules that pick drafter and length every round, by name; each lives in a file of its own.

With full information: ``ratio`` (the default), ``normalhedge``, ``hedge``, ``adanormalhedge``, ``follow_the_leader``,
``accept_length``. Bandits, to compare with: ``ucbspec``, ``exp3spec``, ``metasd``. And ``fixed``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.speculation.arms import Arm, Selector
from edgeduet_client.llm.speculation.selectors.accept_length import AcceptLengthSelector
from edgeduet_client.llm.speculation.selectors.adanormalhedge import AdaNormalHedgeSelector
from edgeduet_client.llm.speculation.selectors.exp3spec import EXP3SpecSelector
from edgeduet_client.llm.speculation.selectors.fixed import FixedSelector
from edgeduet_client.llm.speculation.selectors.follow_the_leader import FollowTheLeaderSelector
from edgeduet_client.llm.speculation.selectors.hedge import HedgeSelector
from edgeduet_client.llm.speculation.selectors.metasd import MetaSDSelector
from edgeduet_client.llm.speculation.selectors.normalhedge import NormalHedgeSelector
from edgeduet_client.llm.speculation.selectors.ratio import RatioSelector
from edgeduet_client.llm.speculation.selectors.ucbspec import UCBSpecSelector
from edgeduet_shared.errors import nearest

SELECTORS: Mapping[str, Callable[..., Selector]] = {
    "accept_length": AcceptLengthSelector,
    "adanormalhedge": AdaNormalHedgeSelector,
    "exp3spec": EXP3SpecSelector,
    "fixed": FixedSelector,
    "follow_the_leader": FollowTheLeaderSelector,
    "hedge": HedgeSelector,
    "metasd": MetaSDSelector,
    "normalhedge": NormalHedgeSelector,
    "ratio": RatioSelector,
    "ucbspec": UCBSpecSelector,
}


def new_selector(
    name: str, arms: Sequence[Arm], options: Mapping[str, Any] | None = None, *, common: Mapping[str, Any] | None = None
) -> Selector:
    """Return a selector that knows nothing yet.

    Args:
        name: a key of :data:`SELECTORS`.
        arms: to choose from.
        options: what is meant for this selector; one it does not have is refused.
        common: what is said for all (seed, discount, carry_over, hysteresis); one it does not have is left out.

    Raises:
        RequestError: no such selector, no such option, or a value it cannot take.
    """
    if name not in SELECTORS:
        raise RequestError(
            f"no selector {name!r}{nearest(name, SELECTORS)}; there are {', '.join(SELECTORS)}", "selector"
        )
    make, options = SELECTORS[name], options or {}
    known = [key for key in inspect.signature(make).parameters if key != "arms"]
    for key in options:
        if key not in known:
            raise RequestError(
                f"selector {name} has no option {key!r}{nearest(key, known)}; it has {', '.join(known) or 'none'}",
                "selector_options",
            )
    taken = {key: value for key, value in (common or {}).items() if key in known}
    try:
        return make(arms, **{**taken, **options})
    except (TypeError, ValueError) as error:
        raise RequestError(f"selector {name}: {error}", "selector_options") from None
