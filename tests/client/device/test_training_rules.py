"""On a device the owner's rules hold, whatever a run asks for; in a simulation there are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgeduet_client.device.device_config import DeviceConfig, PrivacySection
from edgeduet_client.device.training_rules import HOME_VARIABLE, TrainingRules, device_rules
from edgeduet_shared.config import Scenario
from edgeduet_shared.errors import ConfigError
from edgeduet_shared.plan import LocalPlan, Parts
from edgeduet_shared.run_config import RunConfig


def rules(**privacy: Any) -> TrainingRules:
    return TrainingRules(DeviceConfig(privacy=PrivacySection.model_validate(privacy), home=Path("/device")))


def plan(**changes: Any) -> LocalPlan:
    return LocalPlan.model_validate({"parts": Parts().model_dump(), "upload": ("shared_adapter",), **changes})


def run(source: str = "world", **changes: Any) -> RunConfig:
    return RunConfig(Scenario.model_validate({"name": "t", "data": {"source": source}}), "fed-duet", **changes)


def test_outside_a_device_there_are_no_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HOME_VARIABLE, raising=False)
    assert device_rules() is None


def test_personal_state_stays_under_the_device_home() -> None:
    assert rules().personal == Path("/device/personal")


def test_a_run_reads_no_files_the_owner_did_not_name() -> None:
    rules().check_run(run())
    with pytest.raises(ConfigError, match=r"folder:/etc.*not allowed"):
        rules().check_run(run("folder:/etc"))
    with pytest.raises(ConfigError, match="split file"):
        rules().check_run(run(split_file="/etc/shadow"))


@pytest.mark.parametrize(
    ("privacy", "changes", "says"),
    [
        ({}, {"data": "pooled"}, "other clients"),
        ({"send_digest": False}, {"digest": True}, "digests"),
        ({"send_usage": False}, {"usage": True}, "prompts"),
        ({"min_update_noise": 1.0}, {}, "1 or more, the run has 0"),
        ({"min_digest_noise": 0.5}, {"digest": True}, "0.5 or more"),
        (
            {"min_update_noise": 1.0},
            {"privacy": {"update_clip": 1.0, "update_noise": 2.0, "noise_seed": "run"}},
            "must be secret",
        ),
    ],
)
def test_training_that_would_send_too_much_is_refused(
    privacy: dict[str, Any], changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        rules(**privacy).check_training(plan(**changes))


def test_training_within_the_rules_is_let_through() -> None:
    rules().check_training(plan(digest=True, usage=True))
    strict = rules(send_digest=False, send_usage=False, min_update_noise=1.0, min_digest_noise=1.0)
    strict.check_training(plan(privacy={"update_clip": 1.0, "update_noise": 1.0}))
    strict.check_training(plan(upload=()))


def test_scores_leave_only_where_they_may() -> None:
    rules().check_evaluation()
    with pytest.raises(ConfigError, match="send_scores"):
        rules(send_scores=False).check_evaluation()
