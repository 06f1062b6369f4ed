"""Pictures are answered on the device, by command and over HTTP, without torch and by the newest classifier."""

from __future__ import annotations

import base64
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import onnx
import pytest
from fastapi.testclient import TestClient
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from typer.testing import CliRunner

from edgeduet_client.classifier.classifier_folder import MODEL, ClassifierFacts, ClassifierFolder, file_sha256
from edgeduet_client.classifier.preprocessing import Preprocessing
from edgeduet_client.cli import app
from edgeduet_client.device.classify_service import CurrentClassifier, make_app
from edgeduet_client.device.device_config import CONFIG_FILE, DeviceConfig, InferenceSection, write_device_config
from edgeduet_client.llm.serving.access import Access
from edgeduet_shared.errors import DataError, StateError

ROOT = Path(__file__).resolve().parents[3]
COLOURS = ("red", "green", "blue")
TOKEN = "a token of some length"


def publish(root: Path, names: tuple[str, ...] = COLOURS, stage: int = 0) -> None:
    """A real ONNX classifier: the logit of a class is the mean of one colour channel."""

    def write(into: Path) -> ClassifierFacts:
        nodes = [
            helper.make_node("ReduceMean", ["pixels", "axes"], ["mean"], keepdims=0),
            helper.make_node("Mul", ["mean", "ten"], ["logits"]),
        ]
        constants = [
            numpy_helper.from_array(np.array([2, 3]), "axes"),
            numpy_helper.from_array(np.array(10, np.float32), "ten"),
        ]
        pixels = helper.make_tensor_value_info("pixels", TensorProto.FLOAT, ["B", 3, 8, 8])
        logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["B", 3])
        graph = helper.make_graph(nodes, "colours", [pixels], [logits], constants)
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), into / MODEL)
        return ClassifierFacts(
            run="r",
            client=0,
            stage=stage,
            class_names=names,
            seen=(0, 1, 2),
            preprocessing=Preprocessing((8, 8), None, "bicubic", (0.0,) * 3, (1.0,) * 3),
            model_sha256=file_sha256(into / MODEL),
            largest_difference=0.0,
        )

    ClassifierFolder(root).publish(f"stage-{stage:04d}", write)


def picture(colour: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (20, 10), colour).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    config = DeviceConfig(inference=InferenceSection(classify_port=_free_port()))
    write_device_config(config, tmp_path / CONFIG_FILE)
    publish(tmp_path / "classifier")
    return tmp_path


def client(home: Path, token: str | None = None) -> TestClient:
    served = make_app(CurrentClassifier(home / "classifier"), Access(token))
    return TestClient(served, base_url="http://localhost", raise_server_exceptions=False)


# -- the command ---------------------------------------------------------------------------------------


def test_the_command_answers_in_json_and_in_words(home: Path) -> None:
    for colour in ("red", "blue"):
        (home / f"{colour}.png").write_bytes(picture(colour))
    files = [str(home / "red.png"), str(home / "blue.png")]
    shown = CliRunner().invoke(app, ["classify", str(home), *files, "--json", "--top", "2"])
    lines = [json.loads(line) for line in shown.output.splitlines()]
    assert [line["image"] for line in lines] == files
    assert [line["answers"][0]["class"] for line in lines] == ["red", "blue"]
    assert all(len(line["answers"]) == 2 for line in lines)
    assert "red 100.0%" in CliRunner().invoke(app, ["classify", str(home), files[0]]).output


def test_without_a_classifier_or_picture_the_command_says_so(home: Path, tmp_path: Path) -> None:
    missing = CliRunner().invoke(app, ["classify", str(home), str(home / "none.png")])
    assert isinstance(missing.exception, DataError)
    (tmp_path / "a.png").write_bytes(picture("red"))
    write_device_config(DeviceConfig(), tmp_path / "new" / CONFIG_FILE)
    early = CliRunner().invoke(app, ["classify", str(tmp_path / "new"), str(tmp_path / "a.png")])
    assert isinstance(early.exception, StateError)
    assert "first stage" in str(early.exception)


@pytest.mark.parametrize("module", ["edgeduet_client.device.classify_service", "edgeduet_client.device.supervisor"])
def test_neither_service_nor_supervisor_imports_torch_or_flower(module: str) -> None:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "client"))
    code = f"import {module}, sys; print(*(name for name in ('torch', 'flwr') if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, check=True
    )
    assert done.stdout.strip() == ""


# -- over HTTP -----------------------------------------------------------------------------------------


def test_one_picture_is_answered(home: Path) -> None:
    reply = client(home).post("/v1/classify?top=1", content=picture("green"), headers={"content-type": "image/png"})
    assert reply.status_code == 200
    (answer,) = reply.json()["answers"]
    assert [entry["class"] for entry in answer] == ["green"]
    assert answer[0]["probability"] > 0.9
    assert reply.json()["stage"] == 0


def test_several_pictures_are_answered_in_their_order(home: Path) -> None:
    images = [base64.b64encode(picture(colour)).decode() for colour in ("blue", "red")]
    reply = client(home).post("/v1/classify", json={"images": images, "top": 3})
    assert [answer[0]["class"] for answer in reply.json()["answers"]] == ["blue", "red"]


def test_a_newer_classifier_is_used_from_the_next_request_on(home: Path) -> None:
    asked = client(home)
    send = {"content": picture("red"), "headers": {"content-type": "image/png"}}
    assert asked.post("/v1/classify", **send).json()["stage"] == 0  # type: ignore[arg-type]
    publish(home / "classifier", ("rot", "grün", "blau"), stage=1)
    reply = asked.post("/v1/classify", **send).json()  # type: ignore[arg-type]
    assert (reply["stage"], reply["answers"][0][0]["class"]) == (1, "rot")


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [
        ("image/png", b"no picture", 400),
        ("image/png", b"", 400),
        ("text/plain", picture("red"), 400),
        ("application/json", b"{}", 400),
        ("application/json", b'{"images": []}', 400),
        ("application/json", b'{"images": ["%%"]}', 400),
        ("application/json", b'{"images": [7]}', 400),
        ("application/json", b'{"images": ["aGk="], "top": 0}', 400),
        ("application/json", b'{"images": ["aGk="], "path": "/etc/passwd"}', 400),
        ("application/json", b"[" * 100_000, 400),
    ],
)
def test_what_is_no_picture_is_refused_and_the_service_goes_on(
    home: Path, kind: str, content: bytes, status: int
) -> None:
    asked = client(home)
    reply = asked.post("/v1/classify", content=content, headers={"content-type": kind})
    assert reply.status_code == status
    assert reply.json()["error"]["message"]
    good = asked.post("/v1/classify", content=picture("red"), headers={"content-type": "image/png"})
    assert good.status_code == 200


def test_a_body_that_is_too_large_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgeduet_client.device.classify_service.MOST_BYTES", 1000)
    for kind in ("image/png", "application/json"):
        reply = client(home).post("/v1/classify", content=b"x" * 1001, headers={"content-type": kind})
        assert reply.status_code == 413


def test_before_the_first_stage_the_answer_is_503_and_later_it_is_there(tmp_path: Path) -> None:
    asked = client(tmp_path)
    send = {"content": picture("red"), "headers": {"content-type": "image/png"}}
    assert asked.post("/v1/classify", **send).status_code == 503  # type: ignore[arg-type]
    publish(tmp_path / "classifier")
    assert asked.post("/v1/classify", **send).status_code == 200  # type: ignore[arg-type]


def test_a_token_is_asked_for_where_there_is_one_and_a_foreign_host_name_is_turned_away(home: Path) -> None:
    picture_of = {"content": picture("red"), "headers": {"content-type": "image/png"}}
    asked = client(home, TOKEN)
    assert asked.post("/v1/classify", **picture_of).status_code == 401  # type: ignore[arg-type]
    headers = {"content-type": "image/png", "authorization": f"Bearer {TOKEN}"}
    assert asked.post("/v1/classify", content=picture("red"), headers=headers).status_code == 200
    rebound = client(home).post(
        "/v1/classify", content=picture("red"), headers={"content-type": "image/png", "host": "evil.example"}
    )
    assert rebound.status_code == 401


@pytest.fixture
def service(home: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "client"))
    process = subprocess.Popen(
        [sys.executable, "-m", "edgeduet_client.device.classify_service", str(home)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    yield process, f"http://127.0.0.1:{ready['port']}"
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_process_serves_and_ends_politely(service: tuple[subprocess.Popen[str], str]) -> None:
    process, address = service
    reply = httpx.post(
        f"{address}/v1/classify", content=picture("red"), headers={"content-type": "image/png"}, timeout=60
    )
    assert reply.json()["answers"][0][0]["class"] == "red"
    process.terminate()
    assert process.wait(30) == 0


def test_beyond_loopback_the_process_does_not_start_without_a_token(home: Path) -> None:
    open_to_all = InferenceSection(host="0.0.0.0", classify_port=_free_port())
    write_device_config(DeviceConfig().model_copy(update={"inference": open_to_all}), home / CONFIG_FILE)
    path = os.pathsep.join(str(ROOT / folder) for folder in ("shared", "client"))
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop("EDGEDUET_LLM_TOKEN", None)
    done = subprocess.run(
        [sys.executable, "-m", "edgeduet_client.device.classify_service", str(home)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 2
    assert "needs a token" in done.stderr


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])
