"""What one server takes and holds: every bound in one place, each shown by ``edgeduet-client llm serve --help``."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class ServingLimits(BaseModel):
    """Bounds of a server. Whatever is above one is refused with a line that names it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    queue: int = Field(64, ge=0, description="requests of one model that may wait; more are refused (HTTP 429)")
    body_bytes: int = Field(1 << 20, ge=1024, description="bytes of one request")
    prompt_tokens: int | None = Field(None, ge=1, description="tokens of one prompt; None = the model's context")
    max_tokens: int | None = Field(None, ge=1, description="tokens of one answer; None = the model's context")
    default_max_tokens: int = Field(512, ge=1, description="tokens of an answer whose request does not say")
    choices: int = Field(16, ge=1, description="answers of one request: prompts times n")
    inputs: int = Field(64, ge=1, description="texts of one embeddings request")
    timeout_s: float = Field(600.0, gt=0, description="seconds from arrival to the last token")
    drain_s: float = Field(30.0, ge=0, description="seconds that accepted requests have left after SIGTERM")
    cache_bytes: int = Field(256 << 20, ge=0, description="bytes of key-value caches kept for going on with prompts")
