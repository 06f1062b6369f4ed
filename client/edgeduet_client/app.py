"""Flower's entry point of the client: ``edgeduet_client.app:app``.

Imports stay light: on a device every message starts a new process, and torch is loaded only by the
handlers that train or evaluate.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgeduet_shared.messages import HelloReply, HelloRequest, decode, encode
from edgeduet_shared.run_config import RunConfig

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one round."""
    reply: Message = _handlers(context).handle_train(message, context)
    return reply


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate after a stage."""
    reply: Message = _handlers(context).handle_evaluate(message, context)
    return reply


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this node is."""
    decode(message.content, HelloRequest)
    return Message(encode(HelloReply(int(context.node_config["partition-id"]))), reply_to=message)


def _handlers(context: Context) -> Any:
    """Return the module that answers for what the run's scenario trains."""
    if RunConfig.from_flower(context.run_config).scenario.learns == "drafter":
        from edgeduet_client.drafters import handlers as drafter_handlers

        return drafter_handlers
    from edgeduet_client import handlers

    return handlers
