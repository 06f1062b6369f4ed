"""What is known about a model, as rows for people."""

from __future__ import annotations

from edgeduet_client.llm.model_folder import CHAT_TEMPLATE, ModelFolder

LIST_HEAD = ("name", "architecture", "weights", "on disk", "context", "chat", "gate", "licence")


def list_row(folder: ModelFolder) -> tuple[str, ...]:
    """Return the row of ``llm list``."""
    manifest = folder.manifest
    return (
        folder.name,
        f"{manifest.architecture}, {manifest.layers} x {manifest.hidden_width}",
        f"{manifest.dtype}, {manifest.bits_per_weight:.2f} bits",
        human_bytes(disk_bytes(folder)),
        f"{manifest.context_length}",
        _yes(folder.file(CHAT_TEMPLATE).is_file()),
        _yes(_has_gate(folder)),
        manifest.licence,
    )


def model_facts(folder: ModelFolder) -> list[tuple[str, str]]:
    """Return the rows of ``llm show``."""
    manifest = folder.manifest
    facts = [
        ("folder", str(folder.path)),
        ("source", f"{manifest.source} (sha256 {manifest.source_sha256[:16]}...)"),
        ("licence", manifest.licence),
        ("architecture", f"{manifest.architecture}: {manifest.layers} layers, width {manifest.hidden_width}"),
        ("weights", f"{manifest.dtype}, {manifest.bits_per_weight:.2f} bits each on average"),
        ("on disk", human_bytes(disk_bytes(folder))),
        ("memory", _memory(folder)),
        ("context", f"{manifest.context_length} tokens, trained for {manifest.native_context_length}"),
        ("vocabulary", f"{manifest.vocab_size} tokens"),
        ("chat", _yes(folder.file(CHAT_TEMPLATE).is_file())),
        ("gate", "trained" if _has_gate(folder) else "none; edgeduet-client llm gate train makes one"),
    ]
    facts += [(f"check: {name.replace('_', ' ')}", _plain(value)) for name, value in manifest.checks.items()]
    facts.append(("made with", ", ".join(f"{name} {version}" for name, version in manifest.versions.items())))
    return facts


def disk_bytes(folder: ModelFolder) -> int:
    """Return the bytes of all files of the folder, a gate included."""
    return sum(file.stat().st_size for file in folder.path.rglob("*") if file.is_file())


def human_bytes(count: float) -> str:
    """Return ``count`` in the decimal unit that people read best: ``115.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit in ("B", "kB") else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _memory(folder: ModelFolder) -> str:
    manifest = folder.manifest
    full = folder.memory_bytes(manifest.context_length)
    return (
        f"{human_bytes(manifest.memory_weights)} of weights, {human_bytes(manifest.memory_kv_per_token)} a token, "
        f"{human_bytes(full)} with a full context"
    )


def _has_gate(folder: ModelFolder) -> bool:
    from edgeduet_client.llm.gate import Gate

    return Gate.of_model(folder) is not None


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name.replace('_', ' ')} {_plain(entry)}" for name, entry in value.items())
    if isinstance(value, bool):
        return _yes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _yes(value: bool) -> str:
    return "yes" if value else "no"
