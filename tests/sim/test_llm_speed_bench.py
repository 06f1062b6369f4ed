"""The speed benchmark: a peer in its process, who takes part, and ratios by round."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "simulations" / "benchmarks"))

from llm_peer_processes import Entrant, PeerProcess, add_options, entrants, in_turn
from llm_speed_bench import part_of
from llm_speed_tables import tables

from tiny_llm import write_model

LENGTHS = ("64", "512")


def _speed(ours: list[float], peer: list[float | None]) -> dict[str, object]:
    times = {
        "edgeduet int8, greedy": {length: {"prefill": ours, "decode": ours} for length in LENGTHS},
        "genai int8": {length: {"prefill": peer, "decode": peer} for length in LENGTHS},
    }
    facts = {"processor": "x", "cores": 2, "load": [0.0], "versions": {}}
    return {"clock": "cpu", "rounds": len(ours), "date": "today", "machine": facts, "seconds": times}


def _row(page: str, start: str) -> list[str]:
    return next(line for line in page.splitlines() if line.startswith(f"| {start}")).strip("| ").split(" | ")


def test_ratios_are_taken_within_rounds_that_both_took_part_in() -> None:
    # Every round is twice as slow as the one before; the peer is always 1.5 times slower than we are.
    page = tables({"speed, 1 thread": _speed([1.0, 2.0, 4.0], [1.5, None, 6.0])})
    assert _row(page, "genai int8 / ")[1] == "1.50 [1.50, 1.50]"


@pytest.mark.parametrize(("peer", "met"), [(0.96, "yes"), (0.94, "**no**")])
def test_a_missed_target_is_said(peer: float, met: str) -> None:
    page = tables({"speed, 1 thread": _speed([1.0, 1.0], [peer, peer])})
    assert _row(page, "genai int8 / ")[-1] == met


def test_sampling_share_counts_the_whole_step() -> None:
    page = tables({"steps": {"seconds": {"p-less": {"forward": 0.019, "draw": 0.001}}}})
    assert _row(page, "p-less")[-2:] == ["5.0%", "**no**"]


def test_peers_that_are_not_there_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    found = entrants(parser.parse_args(["--gguf", str(tmp_path / "missing.gguf")]))
    assert {entrant.kind.split()[0] for entrant in found} == {"edgeduet"}
    said = capsys.readouterr().out
    assert "left out: genai int8: give --genai-int8" in said
    assert "missing.gguf does not exist" in said


def test_every_runtime_comes_first_once() -> None:
    assert [in_turn("abc", number)[0] for number in range(3)] == ["a", "b", "c"]
    assert sorted(in_turn("abc", 2)) == ["a", "b", "c"]


def test_prompts_have_their_length_and_change() -> None:
    text = range(600)
    assert all(len(part_of(text, 512, number)) == 512 for number in range(-1, 9))
    assert part_of(text, 512, 0) != part_of(text, 512, 1)


def test_a_peer_process_writes_what_the_model_writes(tmp_path: Path) -> None:
    from edgeduet_client.llm.generate import TextPiece
    from edgeduet_client.llm.local_model import LocalModel
    from edgeduet_client.llm.request import GenerationRequest

    write_model(tmp_path)
    model = LocalModel.open(tmp_path, threads=1)
    prompt = model.tokenizer.encode("one two three four")
    request = GenerationRequest(sampler="greedy", min_tokens=8, max_tokens=8)
    expected = [t for event in model.generate(prompt, request) if isinstance(event, TextPiece) for t in event.ids]
    process = PeerProcess(Entrant("ours", "edgeduet greedy", str(tmp_path)), threads=1, models=None)
    try:
        answer = process.ask("generate", prompt=prompt, tokens=8)
        assert answer["ids"] == expected
        assert 0 < answer["decode"]["cpu"] < answer["cpu"]
        memory = process.ask("memory")
        assert 0 < memory["private"] <= memory["pss"] <= memory["peak"]
        assert process.ask("perplexity", ids=prompt)["nll"] > 0
        steps = process.ask("steps", prompt=prompt, tokens=3)
        assert {name: len(times) for name, times in steps.items()} == {"forward": 3, "draw": 3}
    finally:
        process.close()


def test_a_peer_that_cannot_start_says_how_to_see_why(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="to see why"):
        PeerProcess(Entrant("ours", "edgeduet greedy", str(tmp_path / "none")), threads=1, models=None)
