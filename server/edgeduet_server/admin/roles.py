"""Who may call what. A method that is not in the table cannot be called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from edgeduet_shared.errors import ConfigError, nearest


class Role(IntEnum):
    """A role may do what the roles before it may."""

    VIEWER = 1
    OPERATOR = 2
    ADMIN = 3

    @property
    def label(self) -> str:
        """As people write it."""
        return self.name.lower()

    @classmethod
    def parse(cls, text: str) -> Role:
        """Read a role.

        Raises:
            ConfigError: no such role.
        """
        for role in cls:
            if role.label == text:
                return role
        raise ConfigError(f"role: unknown role {text!a}{nearest(text, [role.label for role in cls])}")


@dataclass(frozen=True)
class Rule:
    """The lowest role that may call a method, and whether calls go into the audit log."""

    role: Role
    audited: bool


def _rules(role: Role, audited: bool, methods: str) -> dict[str, Rule]:
    return {method: Rule(role, audited) for method in methods.split()}


RULES: Mapping[str, Rule] = {
    **_rules(
        Role.VIEWER,
        False,
        "Status Doctor ListRuns GetRun ListRounds GetMetrics GetPrompts GetConfig ListClients GetClient ListModels",
    ),
    **_rules(
        Role.OPERATOR,
        True,
        "StartRun ResumeRun StopRun PauseRun UnpauseRun SetConfig ExcludeClient IncludeClient "
        "ExportModel PromoteModel RollbackModel Backup",
    ),
    **_rules(Role.OPERATOR, False, "ListBackups"),
    **_rules(Role.ADMIN, True, "ApproveClient RevokeClient CreateToken RevokeToken DownloadBackup Restore"),
    **_rules(Role.ADMIN, False, "ListTokens ListAudit"),
}
"""Method of the service -> rule. Whatever changes something, or gives out models or the registry, is audited."""
