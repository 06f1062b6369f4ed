"""Answers of the admin service as tables for people; each view takes the answer as plain values."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from edgeduet_server.admin_cli.screen import Values, amount, group, matrix, moment, percent, progress, table

if TYPE_CHECKING:
    from rich.console import RenderableType

_METRICS = {
    "avg": "Avg",
    "last": "Last",
    "forgetting": "Forgetting",
    "bwt": "BWT",
    "personal": "Personal",
    "personal_worst": "Worst client",
}


def status_view(values: Values) -> RenderableType:
    """The whole server on one page."""
    rows = [
        ("server", f"edgeduet {values['version']}, {moment(values['time'])}"),
        ("you", f"{values['token']} ({values['role']})"),
        ("devices", f"{values['devices_online']} of {values['devices']} online"),
    ]
    run = values["run"]
    if run is None:
        rows.append(("run", "none yet; start one with: edgeduet-admin runs start"))
    else:
        rows.append(("run", f"{run['name']} ({run['method']} on {run['scenario']})"))
        rows.append(("state", f"{run['state']}{_beside_state(run)}"))
        rows.append(("progress", progress(run)))
        if run["excluded"]:
            rows.append(("excluded", ", ".join(map(str, run["excluded"]))))
        if run["overrides"]:
            rows.append(("changed", _settings(run["overrides"])))
    last = values["last_round"]
    if last is not None:
        rows.append(("last round", f"{_place(last)}: {_outcome(last)}, {moment(last['ended_at'])}"))
    if values["promoted"] is not None:
        rows.append(("model in use", f"run {values['promoted']['run']}, stage {values['promoted']['stage'] + 1}"))
    warnings = [f"! {line}" for line in values["warnings"]]
    return group(table(rows, ()), *(warnings or ["nothing is wrong"]))


def runs_view(values: Values) -> RenderableType:
    """One line per run."""
    rows = [
        (
            run["name"],
            f"{run['state']}{_beside_state(run)}",
            run["method"],
            run["scenario"],
            run["seed"],
            progress(run),
            moment(run["started_at"]),
            run["error"],
        )
        for run in values["runs"]
    ]
    return table(rows, ("run", "state", "method", "scenario", "seed", "progress", "started", "error"))


def run_view(values: Values) -> RenderableType:
    """Everything about one run."""
    rows = [
        ("run", values["name"]),
        ("state", f"{values['state']}{_beside_state(values)}"),
        ("method", f"{values['method']} {_settings(values['options'])}"),
        ("scenario", f"{values['scenario']}, seed {values['seed']}"),
        ("progress", progress(values)),
        ("tasks", ", ".join(values["tasks"])),
        ("clients", values["clients"]),
        ("excluded", ", ".join(map(str, values["excluded"])) or "nobody"),
        ("changed", _settings(values["overrides"]) or "nothing"),
        ("requested by", values["requested_by"]),
        ("starts", values["starts"]),
        ("Flower's run", values["flower_run_id"]),
        ("folder", values["folder"]),
        *((name, moment(values[f"{name}_at"])) for name in ("created", "started", "ended")),
    ]
    return table([*rows, *([("error", values["error"])] if values["error"] else [])], ())


def rounds_view(values: Values) -> RenderableType:
    """One line per round."""
    rows = [
        (
            _place(row),
            moment(row["ended_at"]),
            _outcome(row),
            "" if row["loss"] is None else f"{row['loss']:.4f}",
            percent(row["accuracy"]) if row["accuracy"] is not None else "",
            amount(row["bytes_down"]),
            amount(row["bytes_up"]),
            f"{row['seconds']:.1f}",
            _remarks(row),
        )
        for row in values["rounds"]
    ]
    head = ("round", "ended", "replies", "loss", "acc %", "down", "up", "s", "remarks")
    return table(rows, head, f"rounds of {values['run']}")


def metrics_view(values: Values) -> RenderableType:
    """Matrices, numbers and clients."""
    if not values["global_matrix"] and not values["personal_matrix"]:
        return group(f"run {values['run']}: no stage is evaluated yet")
    parts: list[RenderableType | str] = []
    for key, title in (("global_matrix", "global model"), ("personal_matrix", "personal models, mean over clients")):
        if values[key]:
            parts.append(matrix(values[key], values["tasks"], f"{title}: accuracy in % (row: after a stage)"))
    numbers = [(title, percent(values["numbers"][key])) for key, title in _METRICS.items() if key in values["numbers"]]
    parts.append(table(numbers, ("metric", "%")))
    rows = [(c["client"], c["name"], percent(c["personal"]), percent(c["general"])) for c in values["clients"]]
    parts.append(table(rows, ("client", "device", "own model %", "global model %")))
    return group(*parts)


def prompts_view(values: Values) -> RenderableType:
    """Use of the pool, and each client's prompts."""
    uses = {int(index): count for index, count in values["uses"].items()}
    if not uses:
        return group(f"run {values['run']}: no prompts were dispatched yet")
    top = sorted(uses, key=lambda index: (-uses[index], index))
    most = uses[top[0]]
    bars = [(index, uses[index], "#" * max(1, round(30 * uses[index] / most))) for index in top[:20]]
    rows = [
        (c["client"], c["name"], _place(c), c["distinct"], " ".join(map(str, c["prompts"]))) for c in values["clients"]
    ]
    return group(
        f"run {values['run']}: {len(uses)} of {values['pool']} prompts were ever dispatched, "
        f"{values['dispatched_per_client']} per client and round",
        table(bars, ("prompt", "dispatched", "")),
        table(rows, ("client", "device", "last", "distinct", "prompts")),
    )


def clients_view(values: Values) -> RenderableType:
    """One line per device."""
    rows = [
        (
            c["name"] or f"node {c['node_id']}",
            c["status"] or "not enrolled",
            c["connection"],
            "" if c["client"] is None else f"{c['client']} of {c['run']}",
            f"{c['rounds_used']}/{c['rounds_asked']}" if c["rounds_asked"] else "",
            "yes" if c["excluded"] else "",
            moment(c["last_seen"]),
            c["refused"] or c["last_failure"],
        )
        for c in values["clients"]
    ]
    head = ("device", "status", "connection", "client", "replies", "excluded", "last seen", "trouble")
    problem = values["flower_problem"]
    return group(table(rows, head), *([f"! who is online is not known: {problem}"] if problem else []))


def client_view(values: Values) -> RenderableType:
    """Everything about one device."""
    rows = [(key.replace("_", " "), _plain(key, value)) for key, value in values.items() if value not in ("", None)]
    return table(rows, ())


def models_view(values: Values) -> RenderableType:
    """One line per model."""
    rows = [
        (m["run"], m["stage"] + 1, amount(m["size"]), m["sha256"][:12], moment(m["created_at"]), _promoted(m))
        for m in values["models"]
    ]
    return table(rows, ("run", "stage", "size", "sha256", "made", "promoted"))


def config_view(values: Values) -> RenderableType:
    """One line per setting."""
    rows = [
        (
            entry["key"],
            json.dumps(entry["value"]),
            "" if entry["value"] == entry["scenario_value"] else json.dumps(entry["scenario_value"]),
            "next round" if entry["settable"] else "fixed",
            f"{entry['by']}{' (pending)' if entry['pending'] else ''}" if entry["by"] else "",
            entry["meaning"],
        )
        for entry in values["settings"]
    ]
    return table(rows, ("setting", "value", "scenario's", "changes", "by", "meaning"), f"settings of {values['run']}")


def tokens_view(values: Values) -> RenderableType:
    """One line per token."""
    rows = [
        (t["name"], t["state"], t["role"], moment(t["expires_at"]), moment(t["last_used_at"]), t["created_by"], t["id"])
        for t in values["tokens"]
    ]
    return table(rows, ("name", "state", "role", "expires", "last used", "made by", "id"))


def audit_view(values: Values) -> RenderableType:
    """One line per entry."""
    rows = [
        (moment(e["time"]), e["token"] or "-", e["role"], e["peer"], e["action"], e["target"], e["outcome"])
        for e in values["entries"]
    ]
    return table(rows, ("time", "token", "role", "from", "action", "target", "outcome"))


def backups_view(values: Values) -> RenderableType:
    """One line per backup."""
    rows = [(b["name"], amount(b["size"]), moment(b["created_at"])) for b in values["backups"]]
    return table(rows, ("backup", "size", "made"))


def _beside_state(run: Values) -> str:
    again = f", start {run['starts']}" if run["starts"] > 1 and run["state"] in ("pending", "running", "paused") else ""
    if run["stop_ordered"] and run["state"] in ("running", "paused"):
        return f"{again} (stops after this round)"
    if run["pause_ordered"] and run["state"] == "running":
        return f"{again} (pauses after this round)"
    return again


def _place(row: Values) -> str:
    return f"{row['stage'] + 1}.{row['round'] + 1}"


def _outcome(row: Values) -> str:
    if not row["asked"]:
        return "skipped" if row["skipped"] else "nobody to ask"
    return f"{len(row['used'])}/{len(row['asked'])}{', SKIPPED' if row['skipped'] else ''}"


def _remarks(row: Values) -> str:
    parts = [f"{count} {reason}" for reason, count in sorted(row["rejected"].items())]
    parts += [f"{f['client']}: {f['text']}" for f in row["failures"][:1]]
    if row["excluded"]:
        parts.append(f"without {', '.join(map(str, row['excluded']))}")
    if row["overrides"]:
        parts.append(_settings(row["overrides"]))
    return "; ".join(parts)


def _settings(values: Values | None) -> str:
    return ", ".join(f"{key}={json.dumps(value)}" for key, value in (values or {}).items())


def _promoted(model: Values) -> str:
    return f"by {model['promoted_by']}, {moment(model['promoted_at'])}" if model["promoted"] else ""


def _plain(key: str, value: object) -> object:
    return moment(str(value)) if key.endswith("_at") or key == "last_seen" else value
