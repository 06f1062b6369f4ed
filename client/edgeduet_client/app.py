"""Flower's entry point of the client: ``edgeduet_client.app:app``.

Imports stay light: on a device every message starts a new process, and torch is loaded only by the
handlers that train or evaluate.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from edgeduet_shared.messages import HelloReply, HelloRequest, decode, encode

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for one round."""
    from edgeduet_client.handlers import handle_train

    return handle_train(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Evaluate after a stage."""
    from edgeduet_client.handlers import handle_evaluate

    return handle_evaluate(message, context)


@app.query("hello")
def hello(message: Message, context: Context) -> Message:
    """Say which client this node is."""
    decode(message.content, HelloRequest)
    return Message(encode(HelloReply(int(context.node_config["partition-id"]))), reply_to=message)
