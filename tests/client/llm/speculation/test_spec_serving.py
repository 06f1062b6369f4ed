"""Speculation where people meet it: a loaded model, the commands, HTTP and gRPC; and what is said about it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from starlette.testclient import TestClient

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.generate import Finished
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.request import GenerationRequest
from edgeduet_client.llm.serving import llm_pb2, llm_pb2_grpc
from edgeduet_client.llm.serving.access import Access
from edgeduet_client.llm.serving.engine import Engine
from edgeduet_client.llm.serving.grpc_api import speculation_message
from edgeduet_client.llm.serving.http_api import make_app
from edgeduet_client.llm.serving.limits import ServingLimits
from edgeduet_client.llm.serving.metrics import Metrics
from edgeduet_client.llm.speculation.arms import Arm
from edgeduet_client.llm.speculation.ngram import NgramDrafter
from edgeduet_client.llm.speculation.options import SpeculationOptions
from edgeduet_client.llm.speculation.speculator import lengths_for, why_unused
from edgeduet_client.llm.speculation.stats import SurvivalStats
from llm_server import COMMAND, serving
from tiny_llm import TINY, write_model

FEW = {40: 20.0, 41: 20.0, 42: 20.0}
"""A bias that leaves the random model three words, so that it repeats itself."""
PROMPT = [40, 41, 42, 43, 40, 41, 42, 43, 40, 41]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    write_model(root / "tiny", architecture=replace(TINY, context_length=2048))
    return root


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is measured is kept in the user's cache folder; here in one of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def opened(models: Path, **options: Any) -> LocalModel:
    return LocalModel.open("tiny", models, threads=1, speculation=SpeculationOptions.from_mapping(options))


def finished(model: LocalModel, prompt: Sequence[int] = PROMPT, **asked: Any) -> tuple[list[int], Finished]:
    ids: list[int] = []
    for event in model.generate(prompt, GenerationRequest(**asked)):
        if isinstance(event, Finished):
            return ids, event
        ids += event.ids
    raise AssertionError("a generation ends with Finished")


@pytest.mark.parametrize("asked", [{"sampler": "greedy"}, {"seed": 3, "temperature": 3.0}])
def test_exact_mode_gives_the_same_answer_with_drafters_and_without(models: Path, asked: dict[str, Any]) -> None:
    without = opened(models, mode="exact", drafters=[])
    drafting = opened(models, mode="exact")
    if not drafting.speculator.invariance.holds:
        pytest.skip("this machine computes rows differently in steps of different sizes")
    wanted, plain = finished(without, max_tokens=80, **asked)
    found, drafted = finished(drafting, max_tokens=80, **asked)
    assert found == wanted
    assert plain.speculation.mean_accepted_tokens == 1
    assert drafted.speculation.invariant is True
    assert not drafted.speculation.lossy


def test_what_speculation_did_is_part_of_the_result(models: Path) -> None:
    model = opened(models, selector="fixed", lengths=[4])
    ids, done = finished(model, sampler="greedy", max_tokens=120, min_tokens=120, logit_bias=FEW)
    stats = done.speculation
    assert stats.emitted == len(ids) - 1 == 119
    assert stats.proposed >= stats.evaluated >= stats.accepted > 0
    assert stats.discarded == stats.proposed - stats.accepted
    assert stats.acceptance == stats.accepted / stats.evaluated
    assert stats.mean_accepted_tokens == pytest.approx(119 / stats.rounds)
    told = stats.as_json()
    json.dumps(told, allow_nan=False)
    assert sum(arm["rounds"] for arm in told["arms"]) == told["rounds"]
    assert set(told["seconds"]) == {"draft", "verify", "catch_up", "sampling", "evaluation"}


def test_lossy_verification_says_so_everywhere(models: Path) -> None:
    model = opened(models, verify="fly", fly={"window": 2, "theta": 0.0}, selector="fixed", lengths=[8])
    _, done = finished(model, sampler="greedy", max_tokens=60)
    assert done.speculation.lossy
    assert any(line.startswith("lossy verification (fly)") for line in done.speculation.messages())
    assert model.speculates == "fast, lossy (fly)"
    for answer in (chat(models_client(models, model)), completion(models_client(models, model))):
        assert answer["usage"]["edgeduet_speculation"]["lossy"] is True
        assert answer["choices"][0]["edgeduet"]["speculation"]["lossy"] is True


def test_a_drafter_that_finds_nothing_is_named_with_the_reason(models: Path) -> None:
    model = opened(models, selector="fixed")
    _, done = finished(model, [50, 60, 70], sampler="greedy", max_tokens=2)
    (line,) = done.speculation.messages()
    assert line.startswith("drafter ngram was never used: ")


def test_a_second_request_at_the_same_time_takes_plain_steps_and_says_so(models: Path) -> None:
    model = opened(models, mode="exact", selector="fixed", lengths=[4])
    request = GenerationRequest(sampler="greedy", max_tokens=30)
    alone, _ = finished(model, sampler="greedy", max_tokens=30)
    first = model.generate(PROMPT, request)
    ids = list(next(first).ids)
    second, done = finished(model, sampler="greedy", max_tokens=30)
    for event in first:
        ids += getattr(event, "ids", ())
    assert ids == second == alone
    assert done.speculation.proposed == 0
    assert "in use by another request" in done.speculation.notes[0]
    _, after = finished(model, sampler="greedy", max_tokens=30)
    assert after.speculation.notes == ()


def test_an_abandoned_answer_frees_the_drafters(models: Path) -> None:
    model = opened(models, selector="fixed")
    events = model.generate(PROMPT, GenerationRequest(sampler="greedy", max_tokens=30))
    next(events)
    events.close()
    assert finished(model, sampler="greedy", max_tokens=30)[1].speculation.notes == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"drafters": [{"name": "a", "kind": "ngrm"}]}, RequestError, "no drafter of kind 'ngrm'"),
        ({"drafters": [{"name": "a", "kind": "ngram", "options": {"n": 3}}]}, RequestError, "drafter a: n: "),
        ({"selector": "psychic"}, RequestError, "psychic"),
    ],
)
def test_what_cannot_be_opened_is_refused_in_one_line(
    models: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        opened(models, **options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def models_client(models: Path, model: LocalModel) -> TestClient:
    metrics = Metrics()
    engine = Engine(ModelFolder.open("tiny", models), model, ServingLimits(), metrics)
    app = make_app({"tiny": engine}, Access(None), ServingLimits(), metrics)
    return TestClient(app, base_url="http://127.0.0.1:8217")


def chat(client: TestClient) -> dict[str, Any]:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "the cat sat"}], "max_tokens": 20}
    answer: dict[str, Any] = client.post("/v1/chat/completions", json=asked).json()
    return answer


def completion(client: TestClient) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": "the cat sat on the cat sat on", "max_tokens": 40, "temperature": 0, "n": 1}
    answer: dict[str, Any] = client.post("/v1/completions", json=asked).json()
    return answer


def test_http_reports_it_in_the_usage_and_in_every_choice(models: Path) -> None:
    client = models_client(models, opened(models, selector="fixed", lengths=[4]))
    answer = completion(client)
    summary = answer["usage"]["edgeduet_speculation"]
    details = answer["choices"][0]["edgeduet"]["speculation"]
    assert summary["mode"] == details["mode"] == "fast"
    assert summary["accepted"] == details["accepted"]
    assert summary["emitted"] == answer["usage"]["completion_tokens"] - 1
    assert client.get("/v1/models").json()["data"][0]["edgeduet"]["speculation"] == "fast"
    text = client.get("/metrics").text
    assert f'edgeduet_llm_draft_tokens_total{{model="tiny",verdict="accepted"}} {float(summary["accepted"])}' in text


def test_http_says_nothing_of_it_where_nothing_speculates(models: Path) -> None:
    client = models_client(models, LocalModel.open("tiny", models, threads=1))
    answer = completion(client)
    assert "edgeduet_speculation" not in answer["usage"]
    assert "speculation" not in answer["choices"][0]["edgeduet"]
    assert client.get("/v1/models").json()["data"][0]["edgeduet"]["speculation"] == ""


def test_a_real_server_reports_it_over_grpc_and_at_the_end_of_a_stream(models: Path) -> None:
    arguments = ("--speculate", "exact", "--drafter", "look=ngram:longest=6", "--selector", "fixed")
    with serving(models / "tiny", *arguments) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub = llm_pb2_grpc.LanguageModelStub(channel)
            sampling = llm_pb2.Sampling(max_tokens=60, min_tokens=60, sampler="greedy", logit_bias=FEW)
            *_, last = stub.Generate(llm_pb2.GenerateRequest(prompt_ids=PROMPT, sampling=sampling))
            (card,) = stub.Models(llm_pb2.ModelsRequest()).models
        told = last.finished.speculation
        assert card.speculation == told.mode == "exact"
        assert told.HasField("row_invariant")
        assert not told.lossy
        assert told.emitted == 59
        assert told.accepted == sum(arm.accepted for arm in told.arms) > 0
        assert {arm.drafter for arm in told.arms} <= {"look", ""}
        assert set(told.arms[0].seconds) == {"draft", "verify", "catch_up", "sampling", "evaluation"}
        asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "min_tokens": 60, "temperature": 0}
        asked["logit_bias"] = {str(token): bias for token, bias in FEW.items()}
        streamed = httpx.post(
            f"{server.http}/v1/completions",
            json={**asked, "stream": True, "stream_options": {"include_usage": True}},
            timeout=60,
        ).text
        usages = [json.loads(line[6:]).get("usage") for line in streamed.splitlines() if line.startswith("data: {")]
        assert usages[-1]["edgeduet_speculation"]["accepted"] == told.accepted
        (loaded,) = [event for event in server.events() if event["event"] == "speculates"]
        assert loaded["drafters"] == ["look"]


def test_the_evidence_of_a_request_and_the_best_arm_in_hindsight_go_over_grpc_as_into_json(models: Path) -> None:
    model = opened(models, drafters=[{"name": "look", "kind": "ngram"}], lengths=[1, 2], eval_budget=0.5)
    request = GenerationRequest(max_tokens=80, min_tokens=80, sampler="greedy", logit_bias=FEW)
    *_, finished = model.generate(PROMPT, request)
    stats = finished.speculation
    told, written = speculation_message(stats), stats.as_json()
    (name,) = told.survival
    assert name == "look"
    known = written["survival"][name]
    assert told.survival[name].starts == known["starts"] > 0
    for part in ("mean", "standard_error", "reach"):
        assert [round(value, 4) for value in getattr(told.survival[name], part)] == known[part]
    assert all(mean <= reach for mean, reach in zip(known["mean"], known["reach"], strict=True))
    best = written["best_fixed_arm"]
    assert (told.best_fixed_arm.drafter or None, told.best_fixed_arm.length) == (best["drafter"], best["length"])
    assert round(told.best_fixed_arm.regret_seconds, 6) == best["regret_seconds"]


def test_without_evidence_no_best_arm_is_named(models: Path) -> None:
    model = opened(models, selector="fixed", drafters=[{"name": "look", "kind": "ngram"}])
    *_, finished = model.generate(PROMPT, GenerationRequest(max_tokens=20, min_tokens=20, sampler="greedy"))
    assert finished.speculation.as_json()["best_fixed_arm"] is None
    assert not speculation_message(finished.speculation).HasField("best_fixed_arm")


def command(models: Path, *arguments: str, stdin: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*COMMAND, "llm", *arguments, "--models", str(models), "--threads", "1"],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stderr
    return done


SAYS = ("the cat sat on the", "-n", "60", "--sampler", "greedy", "--set", f"logit_bias={json.dumps(FEW)}")


def test_generate_drafts_when_told_to_and_writes_the_same(models: Path) -> None:
    exact = ("--speculate", "exact", "--selector", "fixed", "--speculation", "lengths=[3]", "--json")
    without = json.loads(command(models, "generate", "tiny", *SAYS, *exact, "--drafter", "none").stdout)
    drafted = json.loads(command(models, "generate", "tiny", *SAYS, *exact, "--drafter", "ngram").stdout)
    if without["speculation"]["row_invariant"]:
        assert drafted["text"] == without["text"]
    assert drafted["speculation"]["accepted"] > 0
    assert {arm["length"] for arm in drafted["speculation"]["arms"]} == {3}


def test_generate_says_on_standard_error_what_was_not_used(models: Path) -> None:
    arguments = ("--speculate", "fast", "--selector", "fixed", "-n", "2", "--sampler", "greedy")
    done = command(models, "generate", "tiny", "the cat", *arguments)
    assert "drafter ngram was never used: " in done.stderr
    assert "never used" not in done.stdout


def test_chat_drafts_and_says_once_what_was_not_used(models: Path) -> None:
    arguments = ("--speculate", "fast", "--selector", "fixed", "-n", "2", "--sampler", "greedy")
    done = command(models, "chat", "tiny", *arguments, stdin="hello\nworld\n")
    assert done.stderr.count("drafter ngram was never used") <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drafter", "ngram"), "do nothing without --speculate"),
        (("--speculate", "sloppy"), "speculation: mode: "),
        (("--speculate", "fast", "--drafter", "ngrm"), "no drafter of kind 'ngrm'"),
        (("--speculate", "fast", "--speculation", "lenghts=[2]"), "no such setting: lenghts; did you mean 'lengths'"),
    ],
)
def test_a_command_refuses_what_it_does_not_know_in_one_line(
    models: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = command(models, "generate", "tiny", *SAYS, *arguments, code=2)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1


def test_speculating_imports_no_torch(models: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from edgeduet_client.llm.local_model import LocalModel\n"
        "from edgeduet_client.llm.request import GenerationRequest\n"
        "from edgeduet_client.llm.speculation.options import SpeculationOptions\n"
        f"model = LocalModel.open('tiny', Path({str(models)!r}), threads=1, speculation=SpeculationOptions())\n"
        "list(model.generate([5, 6, 7], GenerationRequest(max_tokens=5)))\n"
        "assert not {'torch', 'transformers', 'onnx', 'flwr', 'scipy', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_bench_compares_every_arm_with_plain_decoding(models: Path) -> None:
    arguments = ("--prompt-tokens", "24", "--answer-tokens", "16", "--rounds", "2", "--sampler", "greedy", "-q")
    speculating = ("--speculate", "exact", "--speculation", "lengths=[2,3]")
    told = json.loads(command(models, "bench", "tiny", *arguments, *speculating, "--json").stdout)["speculation"]
    names = [row["name"] for row in told["rows"]]
    assert names[:2] == ["plain decoding", "no draft"]
    assert names[-1] == "selector ratio"
    assert {name for name in names if name.startswith("ngram ")} <= {"ngram 2", "ngram 3", "ngram 5", "ngram 7"}
    assert told["rows"][0]["ratio"] == 1.0
    assert told["rows"][1]["mean_accepted_tokens"] == 1.0
    assert told["oracle"] in names[1:-1]
    assert len(told["step_costs"]) == 9 and told["step_costs"][0] == 1.0
    for row in told["rows"]:
        low, high = row["interval"]
        assert low <= row["ratio"] <= high
        assert row["tokens_per_second"] > 0
    shown = command(models, "bench", "tiny", *arguments, *speculating).stdout
    assert "selector / fastest fixed arm: " in shown
    assert "plain decoding" in shown


class Costs:
    """A plain step takes 10 ms, a drafted token 4 ms more."""

    def seconds(self, arm: Arm, context_length: int) -> float:
        return 0.010 + 0.004 * arm.length


def reason(**known: Any) -> str:
    given = {"played": 0, "rounds": 20, "lengths": (1, 2, 4), "costs": Costs(), "survival": None, "context_length": 100}
    return why_unused("a", **(given | known))


def test_the_reason_why_a_drafter_was_not_used_comes_from_the_costs() -> None:
    assert "a plain step takes 10.0 ms and one with a drafted token 14.0 ms" in reason()
    assert "more than 40% of its first tokens" in reason()
    assert reason().endswith("it was not scored yet")
    poor = reason(survival=SurvivalStats(64, (0.3, 0.1, 0.0, 0.0), (0.1,) * 4, (1.0,) * 4))
    assert poor.endswith("here 30% would have been, at best 0.93x plain decoding")
    assert reason(played=3) == "it was asked in 3 rounds and found nothing to propose"
    assert reason(rounds=0) == "the answer ended with its first token"
    assert reason(costs=None) == "the selector never chose it"


@pytest.mark.parametrize(
    ("granule", "longest", "lengths"),
    [(1, 64, [1, 2, 3, 4, 6, 8]), (2, 64, [1, 3, 5, 7, 9]), (4, 64, [3, 7, 11]), (2, 6, [1, 3, 5, 6])],
)
def test_in_exact_mode_drafts_use_the_rows_that_are_computed_anyway(
    granule: int, longest: int, lengths: list[int]
) -> None:
    drafter = NgramDrafter(longest=longest)
    assert lengths_for(drafter, (1, 2, 3, 4, 6, 8), granule) == lengths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-int8"])
def test_the_real_model_writes_the_same_with_drafters_and_without(name: str) -> None:
    """Greedy, exact mode, texts that repeat themselves and texts that do not."""
    try:
        folder = ModelFolder.open(name)
    except ModelError as missing:
        pytest.skip(f"needs the weights: {missing}")
    options = {"mode": "exact", "lengths": [1, 3, 5]}
    sides = []
    for drafters in ([], [{"name": "ngram", "kind": "ngram"}]):
        speculation = SpeculationOptions.from_mapping({**options, "drafters": drafters, "selector": "fixed"})
        model = LocalModel.open(folder, threads=1, speculation=speculation)
        if not model.speculator.invariance.holds:
            pytest.skip(model.speculator.invariance.sentence())
        texts = (
            "def area(w, h):\n    return w * h\n\ndef volume(w, h, d):\n",
            "Copy this list: apples, pears, plums, cherries. The list again: apples,",
            "The lighthouse keeper climbed the stairs and",
        )
        sides.append(
            [finished(model, model.tokenizer.encode_prompt(text), sampler="greedy", max_tokens=80) for text in texts]
        )
    assert [ids for ids, _ in sides[0]] == [ids for ids, _ in sides[1]]
    assert sum(done.speculation.accepted for _, done in sides[1]) > 0
