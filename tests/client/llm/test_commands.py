"""The commands of the local model: results on standard output, one clear line for what goes wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.cli import main
from edgeduet_client.llm.bench import peak_memory_bytes
from edgeduet_client.llm.model_folder import HEAD_NORMS, list_models
from edgeduet_client.llm.model_tables import human_bytes
from llm_server import COMMAND
from tiny_llm import TINY, write_model

COMMANDS = ("import", "list", "show", "verify", "remove", "generate", "chat", "serve", "bench", "eval", "gate")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "tiny", architecture=replace(TINY, context_length=50_000))
    write_model(root / "base", chat_template=None, name="base", seed=1)
    return root


def run(models: Path, *arguments: str, stdin: bytes = b"", code: int = 0) -> str:
    """Run `edgeduet-client llm` in this process; return what it printed, or the one line of an error."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("EDGEDUET_MODELS", str(models))
        patch.setattr(sys, "argv", ["edgeduet-client", "llm", *arguments])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as ended:
            main()
            sys.exit(0)
    said = err.getvalue()
    assert (ended.value.code or 0) == code, said
    if code == 2:
        assert said.startswith("error: ") and said.count("\n") == 1
        return said
    return out.getvalue()


def test_every_command_explains_itself_with_an_example(models: Path) -> None:
    for command in COMMANDS[:-1]:
        assert f"edgeduet-client llm {command}" in run(models, command, "--help")
    for command in ("train", "eval"):
        assert f"edgeduet-client llm gate {command}" in run(models, "gate", command, "--help")


def test_help_imports_nothing_heavy(models: Path) -> None:
    heavy = "('numpy', 'onnxruntime', 'tokenizers', 'fastapi', 'grpc', 'torch', 'transformers', 'pydantic')"
    code = (
        "import sys\nfrom edgeduet_client.cli import app\n"
        "for command in ([], ['llm'], ['llm', 'serve'], ['llm', 'chat'], ['llm', 'gate', 'train']):\n"
        "    app([*command, '--help'], standalone_mode=False)\n"
        f"print([name for name in {heavy} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_an_error_is_one_line_and_exit_code_2(models: Path) -> None:
    environment = {**os.environ, "EDGEDUET_MODELS": str(models)}
    done = subprocess.run(
        [*COMMAND, "llm", "show", "tinny"], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "did you mean 'tiny'" in done.stderr


def test_answering_and_measuring_import_no_torch(models: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the cat sat on the mat")
    code = (
        "import sys\nsys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from edgeduet_client.cli import app\n"
        "for command in (['generate', 'tiny', 'the cat', '-n', '3'], ['eval', 'tiny', '--texts', sys.argv[1]],\n"
        "                ['bench', 'tiny', '--rounds', '1', '--prompt-tokens', '8', '--answer-tokens', '3'],\n"
        "                ['list'], ['show', 'tiny'], ['verify', 'tiny']):\n"
        "    app(['llm', *command], standalone_mode=False)\n"
        "import edgeduet_client.llm.serving.start, edgeduet_client.llm.serving.grpc_api"
    )
    environment = {**os.environ, "EDGEDUET_MODELS": str(models)}
    command = [sys.executable, "-c", code, str(tmp_path / "text")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 0, done.stderr


def test_list_and_show_tell_names_and_sizes(models: Path) -> None:
    listed = run(models, "list")
    assert re.search(r"tiny +llama, 2 x 48 .*[kM]B", listed) and "base" in listed
    assert [entry["name"] for entry in json.loads(run(models, "list", "--json"))] == ["base", "tiny"]
    shown = run(models, "show", "tiny")
    assert "50000 tokens" in shown and "with a full context" in shown
    assert json.loads(run(models, "show", "tiny", "--json"))["context_length"] == 50_000


def test_list_says_where_there_is_nothing_and_what_is_broken(models: Path, tmp_path: Path) -> None:
    assert "no model in" in run(tmp_path, "list")
    write_model(tmp_path / "torn").file("model.onnx").unlink()
    assert "no model in" in run(tmp_path, "list")
    _, broken = list_models(tmp_path)
    assert len(broken) == 1 and "model.onnx" in broken[0]


def test_verify_finds_an_altered_file(models: Path, tmp_path: Path) -> None:
    assert "files as imported" in run(models, "verify", "tiny")
    folder = write_model(tmp_path / "tiny")
    data = bytearray(folder.file("model.onnx.data").read_bytes())
    data[100] ^= 1
    folder.file("model.onnx.data").write_bytes(data)
    assert "model.onnx.data was altered" in run(tmp_path, "verify", "tiny", code=2)


def test_remove_asks_first(tmp_path: Path) -> None:
    write_model(tmp_path / "tiny")
    run(tmp_path, "remove", "tiny", stdin=b"n\n", code=1)
    assert (tmp_path / "tiny").is_dir()
    assert "deleted" in run(tmp_path, "remove", "tiny", "--yes")
    assert not (tmp_path / "tiny").exists()


def test_generate_writes_the_answer_and_repeats_it_with_a_seed(models: Path) -> None:
    first, again = (run(models, "generate", "tiny", "the cat", "-n", "8", "--seed", "3") for _ in range(2))
    assert first == again and first.strip()
    answer = json.loads(run(models, "generate", "tiny", "the cat", "-n", "8", "--seed", "3", "--json"))
    assert answer["text"] + "\n" == first and answer["completion_tokens"] <= 8


def test_generate_reads_standard_input_and_refuses_what_is_not_utf8(models: Path) -> None:
    piped = run(models, "generate", "tiny", "-", "-n", "4", "--seed", "1", stdin="größer".encode())
    assert piped == run(models, "generate", "tiny", "größer", "-n", "4", "--seed", "1")
    assert "not valid UTF-8 at byte 2" in run(models, "generate", "tiny", "-", stdin=b"ab\xff", code=2)


def test_settings_go_through_and_are_checked(models: Path) -> None:
    answer = json.loads(
        run(models, "generate", "tiny", "x", "-n", "9", "--set", "regex=[0-9]{3}", "--set", "logprobs=1", "--json")
    )
    assert re.fullmatch("[0-9]{3}", answer["text"]) and answer["finish"] == "stop" and answer["logprobs"]
    assert "did you mean 'top_p'" in run(models, "generate", "tiny", "x", "--set", "topp=1", code=2)
    assert "temperature" in run(models, "generate", "tiny", "x", "-t", "-1", code=2)
    assert "KEY=VALUE" in run(models, "generate", "tiny", "x", "--set", "top_p", code=2)
    assert "gate" in run(models, "generate", "tiny", "x", "--gate", "on", code=2)


def test_a_model_that_is_not_there_is_one_line_with_the_nearest_name(models: Path) -> None:
    assert "did you mean 'tiny'" in run(models, "generate", "tinny", "x", code=2)
    assert "base model" in run(models, "generate", "base", "--chat", "x", code=2)
    assert "base model" in run(models, "chat", "base", code=2)


def test_chat_answers_every_line_of_a_pipe(models: Path) -> None:
    said = run(
        models, "chat", "tiny", "-n", "3", "--set", "min_tokens=3", stdin=b"hello\n\n/reset\nhello\n/exit\nnever\n"
    )
    assert said.endswith("\n") and len(said) > 3
    twice = [run(models, "chat", "tiny", "-n", "5", "--seed", "2", stdin=b"hello\n/reset\nhello\n") for _ in range(2)]
    assert twice[0] == twice[1]
    half = len(twice[0]) // 2
    # Forgotten, the conversation begins as it did.
    assert twice[0][:half] == twice[0][half:]
    assert "not valid UTF-8" in run(models, "chat", "tiny", stdin=b"\xff\n", code=2)


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, models: Path) -> None:
        self._ours, theirs = pty.openpty()
        self._seen = b""
        self.process = subprocess.Popen(
            [*COMMAND, "llm", "chat", "tiny", "-n", "40000", "--set", "min_tokens=40000"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "EDGEDUET_MODELS": str(models), "TERM": "dumb"},
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: bytes) -> None:
        """Type ``text``."""
        os.write(self._ours, text)

    def read_until(self, text: bytes, seconds: float = 20) -> None:
        """Wait until ``text`` shows after what was read before."""
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            assert time.monotonic() < deadline, self._seen[-500:]
            if select.select([self._ours], [], [], 0.2)[0]:
                self._seen += os.read(self._ours, 65536)
        self._seen = self._seen.partition(text)[2]

    def close(self) -> None:
        """End it."""
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(models: Path) -> Iterator[Terminal]:
    terminal = Terminal(models)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_not_the_program(terminal: Terminal) -> None:
    terminal.read_until(b"> ")
    terminal.type(b"hello\n")
    terminal.read_until(b"\n")
    time.sleep(0.5)  # in the middle of the answer
    terminal.process.send_signal(signal.SIGINT)
    terminal.read_until(b"(cancelled)")
    terminal.read_until(b"> ")
    time.sleep(0.5)  # readline shows its prompt a moment before it listens to Ctrl-C
    terminal.process.send_signal(signal.SIGINT)  # at the prompt
    terminal.read_until(b"Ctrl-D ends")
    terminal.type(b"/nonsense\n")
    terminal.read_until(b"no command /nonsense")
    terminal.type(b"/system be brief\n")
    terminal.read_until(b"new conversation")
    terminal.type(b"/exit\n")
    assert terminal.process.wait(10) == 0


def test_bench_reports_medians(models: Path) -> None:
    arguments = ("bench", "tiny", "--rounds", "2", "--prompt-tokens", "40", "--answer-tokens", "6", "--threads", "1")
    found = json.loads(run(models, *arguments, "--json"))
    assert found["rounds"] == 2 and found["threads"] == 1 and found["sampler"] == "p-less"
    for name in ("prefill_tokens_per_second", "first_token_seconds", "decode_tokens_per_second"):
        assert 0 < found[name]["least"] <= found[name]["median"] <= found[name]["largest"]
    assert found["peak_memory_bytes"] > 10_000_000
    assert "writing, tokens/s" in run(models, *arguments)
    assert "more than the context" in run(models, "bench", "tiny", "--prompt-tokens", "60000", code=2)


def test_eval_reports_perplexity_of_each_text(models: Path, tmp_path: Path) -> None:
    texts = []
    for number, text in enumerate(("the cat sat on the mat " * 20, "Über Straßen")):
        texts += ["--texts", str(tmp_path / f"{number}.txt")]
        (tmp_path / f"{number}.txt").write_text(text, "utf-8")
    whole, cut = (
        json.loads(run(models, "eval", "tiny", *texts, "--window", window, "--json")) for window in ("1000", "16")
    )
    assert [entry["window"] for entry in cut] == [16, 16]
    assert whole[0]["tokens"] > cut[0]["tokens"] > 0.9 * whole[0]["tokens"]
    assert all(entry["perplexity"] > 1 and entry["bits_per_byte"] > 0 for entry in (*whole, *cut))
    assert "perplexity" in run(models, "eval", "tiny", *texts)
    (tmp_path / "empty.txt").write_text("")
    for file, says in (("empty.txt", "fewer than two tokens"), ("missing.txt", "No such file")):
        assert says in run(models, "eval", "tiny", "--texts", str(tmp_path / file), code=2)


def test_sizes_are_human() -> None:
    assert [human_bytes(count) for count in (0, 999, 1000, 115_415_296, 2_500_000_000, 10**13)] == [
        "0 B",
        "999 B",
        "1 kB",
        "115.4 MB",
        "2.5 GB",
        "10.0 TB",
    ]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system's own figure is Linux's")
def test_peak_memory_is_the_systems_own_figure_in_bytes() -> None:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match and peak_memory_bytes() == pytest.approx(int(match[1]) * 1024, rel=0.02)


def test_a_gate_is_trained_shown_and_measured(tmp_path: Path) -> None:
    texts, models = tmp_path / "texts", tmp_path / "models"
    texts.mkdir()
    for language, words in (
        ("en", "the cat sat on the mat"),
        ("ru", "Привет мир Привет"),
        ("zh", "日本語の文と中文的句子"),
    ):
        lines = [json.dumps({"prompt": f"{words} {number}", "response": f"{words} {number}"}) for number in range(12)]
        (texts / f"{language}.jsonl").write_text("\n".join(lines), "utf-8")
    folder = write_model(models / "tiny")
    np.save(folder.file(HEAD_NORMS), np.ones(folder.manifest.vocab_width, np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        assert "no gate" in run(models, "gate", "eval", "tiny", "--texts", str(texts), code=2)
        trained = json.loads(
            run(models, "gate", "train", "tiny", "--texts", str(texts), "--epochs", "2", "--seed", "1", "--json")
        )
        assert trained["record"]["seed"] == 1 and set(trained["f1"]) == {"cj", "latin", "symbols", "low_res"}
        arguments = ("gate", "eval", "tiny", "--texts", str(texts), "--answers", "2", "--answer-tokens", "4")
        found = json.loads(run(models, *arguments, "--json"))
        assert found["request"]["sampler"] == "p-less" and found["texts"] > 0
        assert set(found["with_gate"]["confused_answers"]) == {"cj", "latin"}
        table = run(models, *arguments)
        assert "confused answers, Latin" in table and "share of a whole step" in table
    assert re.search(r"gate +trained", run(models, "show", "tiny"))
    assert json.loads(run(models, "generate", "tiny", "x", "--gate", "on", "-n", "3", "--json"))["text"]
    assert "--norms mean" in run(models, "gate", "train", "tiny", "--norms", "mean", code=2)
