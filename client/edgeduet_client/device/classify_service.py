"""``POST /v1/classify`` on the device: pictures in, classes out, with ONNX Runtime and without torch.

The body is one picture (``Content-Type: image/...``), or JSON with several: ``{"images": [BASE64, ...], "top": 3}``.
Who may ask is ruled as for the language models (``edgeduet_client.llm.serving.access``): this machine without a
token, others with one. A classifier made after a later stage is used from the next request on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import io
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response

from edgeduet_client.classifier.classifier_folder import CURRENT, ClassifierFolder
from edgeduet_client.classifier.classifying import Answer, Classifier, open_image
from edgeduet_client.device.device_config import DeviceConfig, load_device_config
from edgeduet_client.llm.errors import RequestError
from edgeduet_client.llm.serving.access import Access, access_for, read_token
from edgeduet_client.llm.serving.http_api import read_json
from edgeduet_client.llm.serving.refusals import TooLarge, TooSlow, verdict
from edgeduet_client.llm.serving.server import listen
from edgeduet_shared.errors import DataError, EdgeDuetError, StateError

log = logging.getLogger("edgeduet.device")

MOST_BYTES = 32 << 20
MOST_IMAGES = 64
MOST_TOP = 1000
_BODY_S = 30
_DRAIN_S = 10


class CurrentClassifier:
    """The classifier in use, loaded again when another was put into use.

    Calls come from many threads; a picture is classified by one at a time, so that ``threads`` is kept to.
    """

    def __init__(self, root: Path, *, threads: int = 1) -> None:
        self._folder = ClassifierFolder(root)
        self._threads = threads
        self._lock = threading.Lock()
        self._loaded: Classifier | None = None
        self._stamp: tuple[int, int] | None = None

    def answer(self, contents: list[bytes], top: int) -> tuple[dict[str, Any], list[Answer]]:
        """Return facts of the classifier and an answer per picture.

        Raises:
            StateError: there is no classifier yet.
            DataError: a content is no picture.
        """
        with self._lock:
            classifier = self._current()
            images = [open_image(io.BytesIO(content), f"picture {n}") for n, content in enumerate(contents, 1)]
            facts = {"run": classifier.facts.run, "stage": classifier.facts.stage}
            return facts, classifier.classify(images, top=top)

    def _current(self) -> Classifier:
        stamp = self._stamp_now()
        if self._loaded is None or stamp != self._stamp:
            self._loaded = Classifier(self._folder, threads=self._threads)
            self._stamp = stamp
            log.info("classifier of stage %d loaded", self._loaded.facts.stage)
        return self._loaded

    def _stamp_now(self) -> tuple[int, int] | None:
        try:
            status = (self._folder.root / CURRENT).stat()
        except FileNotFoundError:
            return None
        # The file is replaced whole, so that another version is another inode or another time.
        return status.st_ino, status.st_mtime_ns


def make_app(classifier: CurrentClassifier, access: Access) -> FastAPI:
    """Return the application."""
    app = FastAPI(title="edgeduet classifier", docs_url=None, redoc_url=None, openapi_url=None)

    async def allowed(request: Request) -> None:
        access.check_host(request.headers.get("host"))
        access.check_token(request.headers.get("authorization"))

    @app.post("/v1/classify", dependencies=[Depends(allowed)])
    async def classify(request: Request) -> Response:
        contents, top = await _pictures(request)
        facts, answers = await asyncio.to_thread(classifier.answer, contents, top)
        return JSONResponse({**facts, "answers": [answer_json(answer) for answer in answers]})

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"})

    @app.exception_handler(EdgeDuetError)
    async def refused(request: Request, error: EdgeDuetError) -> Response:
        return JSONResponse({"error": {"message": str(error)}}, _status(error))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("a request failed", exc_info=error)
        return JSONResponse({"error": {"message": f"{type(error).__name__}; the log of the device says more"}}, 500)

    return app


def answer_json(answer: Answer) -> list[dict[str, Any]]:
    """Return an answer for JSON, likeliest class first."""
    pairs = zip(answer.classes, answer.probabilities, strict=True)
    return [{"class": name, "probability": probability} for name, probability in pairs]


async def _pictures(request: Request) -> tuple[list[bytes], int]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/"):
        return [await _body(request)], _top(request.query_params.get("top", "5"))
    if kind != "application/json":
        raise RequestError(
            "send a picture as 'Content-Type: image/jpeg' (or another image type), or JSON with 'images'"
        )
    asked = await read_json(request, MOST_BYTES)
    if not isinstance(asked, dict) or set(asked) - {"images", "top"} or not isinstance(asked.get("images"), list):
        raise RequestError("send {'images': [BASE64, ...]}, with 'top' if you like, and nothing else")
    if not 1 <= len(asked["images"]) <= MOST_IMAGES:
        raise RequestError(f"send 1 to {MOST_IMAGES} images at once, not {len(asked['images'])}", "images")
    return [_decoded(text, n) for n, text in enumerate(asked["images"], 1)], _top(asked.get("top", 5))


async def _body(request: Request) -> bytes:
    content = bytearray()
    try:
        async with asyncio.timeout(_BODY_S):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BYTES:
                    raise TooLarge(f"the picture is larger than the {MOST_BYTES} bytes this server reads")
    except TimeoutError:
        raise TooSlow(f"the picture did not arrive within {_BODY_S} seconds") from None
    return bytes(content)


def _decoded(text: Any, number: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, ValueError, binascii.Error) as error:
        raise RequestError(f"image {number} is not base64", "images") from error


def _top(value: Any) -> int:
    try:
        top = int(str(value))
    except ValueError:
        top = 0
    if not 1 <= top <= MOST_TOP:
        raise RequestError(f"'top' must be a whole number from 1 to {MOST_TOP}", "top")
    return top


def _status(error: EdgeDuetError) -> int:
    if isinstance(error, DataError):
        return 400
    if isinstance(error, StateError):
        return 503
    return verdict(error).http


def serve(config: DeviceConfig) -> int:
    """Serve until a signal; return the exit code.

    Raises:
        AccessError: other machines could ask without a token.
        AddressError: the address cannot be listened on.
    """
    inference = config.inference
    access = access_for(inference.host, read_token(None))
    classifier = CurrentClassifier(config.folder("classifier"), threads=config.limits.threads)
    settings = uvicorn.Config(
        make_app(classifier, access),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_S,
    )
    with listen(inference.host, inference.classify_port) as door:
        print(json.dumps({"event": "ready", "host": inference.host, "port": door.getsockname()[1]}), flush=True)
        uvicorn.Server(settings).run(sockets=[door])
    return 0


def main() -> int:
    """Serve the device whose home is the only argument; a problem is one line and exit code 2."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(message)s")
    # uvicorn answers what is running, ends, and passes the signal on: that is no failure of ours.
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        return serve(load_device_config(Path(sys.argv[1])))
    except EdgeDuetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
