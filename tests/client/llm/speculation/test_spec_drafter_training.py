"""Making a drafter: what is read, what is learnt, and that no interruption costs more than the unit in work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.gate import ModelBinding
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder
from edgeduet_client.llm.speculation.drafter_artefact import list_drafters, remove_drafter
from edgeduet_client.llm.speculation.drafter_corpus import choose_prompts
from edgeduet_client.llm.speculation.drafter_dataset import LABELS, DrafterDataset, Positions, ReadText, TargetTables
from edgeduet_client.llm.speculation.drafter_export import acceptance_by_domain, choose_vocabulary
from edgeduet_client.llm.speculation.drafter_making import Checkpoint, MakingOptions, make_drafter
from edgeduet_client.llm.speculation.drafter_reading import (
    PromptIds,
    ReadingOptions,
    TextStore,
    encode_prompts,
    read_text,
    read_texts,
)
from edgeduet_client.llm.speculation.drafter_training import (
    DrafterConfig,
    TrainingState,
    acceptance,
    initial_parameters,
    learning_rate,
    train,
)
from edgeduet_client.llm.speculation.recurrent import FACTORY, RecurrentSession
from edgeduet_client.llm.speculation.target_tables import target_tables
from edgeduet_client.llm.speculation.text import CommittedText
from tiny_llm import write_model

torch = pytest.importorskip("torch")

SENTENCES = [
    " ".join(
        f"the quick brown fox and the lazy dog number {number} sat on the mat {part}"
        for part in ("one", "two", "three")
    )
    for number in range(30)
]
READING = ReadingOptions(prompt_tokens=40, answer_tokens=16)
SMALL = MakingOptions(
    positions=1500, steps=40, batch=32, vocabulary=100, inner_width=16, per_domain=40, reading=READING
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return write_model(tmp_path / "models" / "tiny", seed=0)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus"
    path.mkdir()
    (path / "a.txt").write_text("\n\n".join(SENTENCES), "utf-8")
    return path


# --- reading -------------------------------------------------------------------------------------------


def test_what_is_kept_of_a_position_is_what_the_target_says_there(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    prompt = PromptIds("prose", tuple(range(20, 40)), first=4, greedy=False)
    text = read_text(local, local.new_cache(), prompt, READING)
    everything = [*prompt.ids[:4], *text.tokens.tolist()]
    forward = local.session.prefill(everything, local.new_cache(), rows=range(len(everything)), hidden=True)
    assert forward.hidden is not None
    np.testing.assert_allclose(text.hidden, forward.hidden[4:], atol=5e-3)
    logits = forward.logits[4:, : local.vocabulary.used].astype(np.float64)
    masses = np.exp(logits - logits.max(axis=1, keepdims=True))
    masses /= masses.sum(axis=1, keepdims=True)
    assert (text.label_ids[:, 0] == masses.argmax(axis=1)).all()
    np.testing.assert_allclose(text.label_masses, np.take_along_axis(masses, text.label_ids, 1), atol=2e-3)
    assert text.tokens[: 20 - 4].tolist() == list(prompt.ids[4:])
    assert text.answer == 15


def test_a_greedy_answer_is_the_targets_best_token_every_time(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    text = read_text(local, local.new_cache(), PromptIds("prose", tuple(range(20, 40)), 0, greedy=True), READING)
    following = text.tokens[text.answer + 1 :]
    assert len(following)
    assert following.tolist() == text.label_ids[text.answer : -1, 0].tolist()


def test_chats_share_their_frame_and_only_what_follows_is_learnt(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    prompts = [p for p in choose_prompts(per_domain=6) if p.domain == "questions"]
    encoded = encode_prompts(local.tokenizer, prompts, READING)
    frames = {prompt.ids[: prompt.first] for prompt in encoded}
    assert len(frames) == 1 and len(next(iter(frames))) > 0
    assert [prompt.greedy for prompt in encoded] == [place % 2 == 0 for place in range(len(encoded))]


def test_without_a_corpus_five_domains_take_turns() -> None:
    prompts = choose_prompts(per_domain=5)
    turn = ["chats"] * 3 + ["code", "edits", "prose", "questions"]
    assert [prompt.domain for prompt in prompts if prompt.write] == turn * 5
    assert prompts == choose_prompts(per_domain=5)


def test_what_is_only_read_is_no_part_of_what_is_continued_or_edited() -> None:
    prompts = choose_prompts(per_domain=20)
    read = [prompt for prompt in prompts if not prompt.write]
    assert {prompt.domain for prompt in read} == {"code", "prose"} and len(read) > 40
    for prompt in prompts:
        if prompt.write and prompt.domain not in ("chats", "questions"):
            assert not any(piece.text[:200] in prompt.text for piece in read)


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no text"):
        choose_prompts(tmp_path)


def test_a_half_written_record_is_forgotten_and_read_again(folder: ModelFolder, tmp_path: Path, corpus: Path) -> None:
    local = LocalModel.open(folder, threads=1)
    prompts = encode_prompts(local.tokenizer, choose_prompts(corpus), READING)
    store = TextStore.of(tmp_path / "work", ModelBinding.of(folder), READING)
    whole = read_texts(local, prompts, store, READING, positions=200, clock=time.monotonic)
    size = store.path.stat().st_size
    with store.path.open("r+b") as stream:
        stream.truncate(size - 7)
    assert len(store.read({prompt.key: prompt for prompt in prompts})) == len(whole) - 1
    again = read_texts(local, prompts, store, READING, positions=200, clock=time.monotonic)
    assert store.path.stat().st_size == size
    for before, after in zip(whole, again, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_array_equal(before.hidden, after.hidden)


def test_a_conversation_of_its_own_is_a_chat_whose_request_the_model_wrote(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    prompts = [prompt for prompt in choose_prompts(per_domain=4) if prompt.domain == "chats"]
    encoded = encode_prompts(local.tokenizer, prompts, READING)
    assert len(encoded) == len(prompts) == len({prompt.key for prompt in encoded})
    requests = set()
    for prompt in encoded:
        text = read_text(local, local.new_cache(), prompt, READING)
        whole = [*prompt.ids, *text.tokens[1:].tolist()]
        request = whole[len(prompt.ids) : prompt.first + text.answer + 1 - len(prompt.tail)]
        framed = local.tokenizer.encode_chat([{"role": "user", "content": local.tokenizer.decode(request)}])
        assert framed[: len(prompt.ids)] == list(prompt.ids)
        assert framed[-len(prompt.tail) :] == list(prompt.tail)
        assert whole[: prompt.first + text.answer + 1] == [*prompt.ids, *request, *prompt.tail]
        assert len(request) <= READING.request_tokens
        requests.add(tuple(request))
        if prompt.greedy:
            assert text.tokens[text.answer + 1 :].tolist() == text.label_ids[text.answer : -1, 0].tolist()
    assert len(requests) > 1


def test_a_text_that_is_only_read_ends_where_it_ends(folder: ModelFolder) -> None:
    local = LocalModel.open(folder, threads=1)
    prompts = [prompt for prompt in choose_prompts(per_domain=4) if prompt.domain == "code"]
    encoded = [prompt for prompt in encode_prompts(local.tokenizer, prompts, READING) if not prompt.write]
    text = read_text(local, local.new_cache(), encoded[0], READING)
    assert tuple(text.tokens) == encoded[0].ids and len(text.hidden) == len(text.label_ids) == len(text)
    assert not text.greedy


# --- learning ------------------------------------------------------------------------------------------


def learnable(count: int = 8, length: int = 60, *, seed: int = 0) -> DrafterDataset:
    """Texts that a drafter can learn: token t is followed by its fixed successor, which the target is sure of.

    States say nothing (they are noise), so all there is to learn is the successor of the token read.
    """
    rng = np.random.default_rng(seed)
    width, tokens = 24, 40
    successor = np.random.default_rng(7).permutation(tokens)
    embedding = np.random.default_rng(8).standard_normal((tokens, width)).astype(np.float32)
    head = np.random.default_rng(9).standard_normal((tokens, width)).astype(np.float32)
    texts = []
    for place in range(count):
        line = [int(rng.integers(tokens))]
        while len(line) < length:
            line.append(int(successor[line[-1]]))
        read = np.array(line, np.int32)
        masses = np.zeros((length, LABELS), np.float16)
        masses[:, 0] = 1
        labels = np.zeros((length, LABELS), np.int32)
        labels[:, 0] = successor[read]
        hidden = rng.standard_normal((length, width)).astype(np.float16)
        texts.append(ReadText(("a", "b")[place % 2], True, 3, read, hidden, labels, masses))
    return DrafterDataset(texts, TargetTables(np.arange(tokens), head, lambda ids: embedding[ids]))


CONFIG = DrafterConfig(hidden_width=24, inner_width=32, steps=250, batch=64, learning_rate=5e-3, warm_up=10)


def test_it_learns_what_follows_what_three_tokens_deep() -> None:
    data = learnable()
    before = acceptance(initial_parameters(CONFIG), data, CONFIG)
    parameters, metrics = train(initial_parameters(CONFIG), data, CONFIG)
    found = acceptance(parameters, learnable(seed=1), CONFIG)
    assert before[0] is not None and before[0] < 0.3
    assert all(share is not None and share > 0.95 for share in found)
    assert metrics["steps"] == 250 and metrics["loss"] < 1


def test_a_training_cut_anywhere_gives_the_same_parameters() -> None:
    config = CONFIG.model_copy(update={"steps": 30})
    data = learnable(count=3)
    whole, _ = train(initial_parameters(config), data, config)
    kept: list[TrainingState] = []
    with pytest.raises(KeyboardInterrupt):
        train(initial_parameters(config), data, config, save=kept.append, save_every=7, progress=_stop_at(17))
    assert kept[-1].step == 14
    resumed, _ = train(initial_parameters(config), data, config, state=kept[-1])
    for name, values in whole.items():
        np.testing.assert_array_equal(values, resumed[name])


def _stop_at(step: int) -> Callable[[int, int], None]:
    def progress(done: int, total: int) -> None:
        if done == step:
            raise KeyboardInterrupt

    return progress


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    data = learnable(count=2)
    checkpoint = Checkpoint.of(tmp_path, data, CONFIG)
    assert checkpoint.read() == (None, None)
    state = TrainingState.new(initial_parameters(CONFIG))
    state.step, state.losses = 12, (1.5, 0.5)
    checkpoint.write(state, 99)
    again, steps = Checkpoint.of(tmp_path, data, CONFIG).read()
    assert again is not None and steps == 99 and (again.step, again.losses) == (12, (1.5, 0.5))
    for name, values in state.parameters.items():
        np.testing.assert_array_equal(again.parameters[name], values)
    assert Checkpoint.of(tmp_path, learnable(count=2, seed=5), CONFIG).path != checkpoint.path


def test_labels_outside_the_vocabulary_count_nothing_and_the_others_sum_to_one() -> None:
    data = learnable(count=2)
    tables = TargetTables(np.arange(0, 40, 2), data.tables.head_NH[::2], data.tables.embed)
    laid = Positions.of(DrafterDataset(data.texts, tables), 2)
    inside = np.concatenate([text.label_ids[:, 0] % 2 == 0 for text in data.texts])
    np.testing.assert_array_equal(laid.masses_PL.sum(axis=1), inside.astype(np.float32))
    following = np.concatenate([text.tokens for text in data.texts])[1:]
    np.testing.assert_array_equal(laid.truth_P[:-1] >= 0, following % 2 == 0)
    known = laid.truth_P[:-1][following % 2 == 0]
    np.testing.assert_array_equal(tables.vocabulary_N[known], following[following % 2 == 0])


def test_every_domain_is_held_out_and_no_text_is_on_both_sides() -> None:
    learnt, held = learnable(count=20).split(0.1, seed=3)
    assert held.domains() == ["a", "b"] and len(learnt.texts) + len(held.texts) == 20
    assert not {id(text) for text in learnt.texts} & {id(text) for text in held.texts}


def test_the_vocabulary_is_what_the_target_says_most() -> None:
    data = learnable(count=2)
    chosen = choose_vocabulary(data.texts, 10, used=40, always=[39])
    said = np.zeros(40)
    for text in data.texts:
        np.add.at(said, text.label_ids[text.answer :, 0], 4)
        np.add.at(said, text.label_ids[: text.answer, 0], 1)
    assert 39 in chosen and len(chosen) == 10 and (np.diff(chosen) > 0).all()
    others = np.delete(said, chosen)
    assert said[chosen[chosen != 39]].min() >= others.max()


def test_the_learning_rate_warms_up_and_comes_down_to_a_tenth() -> None:
    rates = [learning_rate(CONFIG, step) for step in range(CONFIG.steps)]
    assert rates[0] < rates[9] == CONFIG.learning_rate
    assert all(late <= early for early, late in pairwise(rates[9:]))
    assert rates[-1] == pytest.approx(CONFIG.learning_rate / 10, rel=0.01)


# --- making --------------------------------------------------------------------------------------------


def test_a_drafter_is_made_described_and_used(folder: ModelFolder, corpus: Path, tmp_path: Path) -> None:
    card = make_drafter(folder, corpus=corpus, options=SMALL, threads=1, work=tmp_path / "work")
    assert card.parity["same_best"] > 0.8 and card.vocabulary == 100
    assert set(card.acceptance) == {"edits", "prose"} == set(card.training["domains"])
    usable, broken = list_drafters(folder)
    assert [drafter.card for drafter in usable] == [card] and not broken
    drafter = FACTORY.open("recurrent", {"threshold": 0.0}, LocalModel.open(folder, threads=1))
    assert drafter.needs_hidden and drafter.memory_bytes() == 3 * card.bytes
    assert not list((tmp_path / "work").glob("training-*"))  # no checkpoint of a training that ended
    with pytest.raises(ModelError, match="has a drafter named"):
        make_drafter(folder, corpus=corpus, options=SMALL, threads=1, work=tmp_path / "work")
    remove_drafter(folder, "recurrent")
    assert list_drafters(folder) == ([], [])


def test_stated_acceptance_is_what_its_drafts_reach(folder: ModelFolder, corpus: Path, tmp_path: Path) -> None:
    """Scored at once over all places, and by really drafting at each of them."""
    make_drafter(folder, corpus=corpus, options=SMALL, threads=1, work=tmp_path / "work")
    local = LocalModel.open(folder, threads=1)
    drafter = FACTORY.open("recurrent", {"threshold": 0.0}, local)
    text = read_text(local, local.new_cache(), PromptIds("prose", tuple(range(20, 40)), 0, greedy=True), READING)
    session = RecurrentSession(folder.path / "drafters/recurrent/drafter.onnx", folder.path)
    (stated,) = acceptance_by_domain(session, DrafterDataset([text], target_tables(folder, np.arange(5)))).values()
    tried, right = np.zeros(3), np.zeros(3)
    for place in range(text.answer + 1, len(text) - 3):
        past = CommittedText(text.tokens[:place].tolist())
        past.extend(
            [int(text.tokens[place])],
            [Distribution(text.tokens[place : place + 1].astype(np.int64), CERTAIN)],
            text.hidden[place - 1 : place].astype(np.float32),
        )
        draft = drafter.draft(past, 3, np.random.default_rng(0)).tokens
        for level in range(3):
            tried[level] += 1
            if level >= len(draft) or draft[level] != text.tokens[place + level + 1]:
                break
            right[level] += 1
    expected = [hits / count if count else None for hits, count in zip(right, tried, strict=True)]
    assert stated == expected


def test_too_little_memory_is_said_before_anything_is_read(folder: ModelFolder, corpus: Path, tmp_path: Path) -> None:
    options = SMALL.model_copy(update={"memory_mb": 1, "positions": 100_000})
    with pytest.raises(ModelError, match="MB may be used"):
        make_drafter(folder, corpus=corpus, options=options, threads=1, work=tmp_path / "work")
    assert not (tmp_path / "work").exists()


def test_minutes_bound_reading_and_training(folder: ModelFolder, corpus: Path, tmp_path: Path) -> None:
    """A clock that runs on by itself: each look at it takes a second."""
    looks = iter(range(1_000_000))
    options = SMALL.model_copy(update={"minutes": 1.0, "positions": 100_000, "steps": 5000})
    card = make_drafter(
        folder,
        corpus=corpus,
        options=options,
        threads=1,
        work=tmp_path / "work",
        clock=lambda: float(next(looks)),
    )
    assert 0 < card.training["positions"] < 2000
    # Four updates on trial took one look, so four fit into each second that is left of the half for training.
    assert 0 < card.training["steps"] <= 4 * 60


@pytest.mark.slow
def test_a_killed_making_loses_the_unit_in_work_only(folder: ModelFolder, corpus: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of reading and again in the middle of training; what comes out is the same."""
    script = (
        "import sys; from pathlib import Path; import torch; torch.set_num_threads(1)\n"
        "from edgeduet_client.llm.speculation.drafter_making import *\n"
        f"options = MakingOptions.model_validate_json({SMALL.model_dump_json()!r})\n"
        "options = options.model_copy(update={'steps': 230, 'batch': 16})\n"
        "told = lambda what, done, total: print(what, done, flush=True)\n"
        "make_drafter(Path(sys.argv[1]), corpus=sys.argv[2], options=options, threads=1, work=Path(sys.argv[3]),"
        " progress=told)\n"
    )

    def run(model: Path, work: Path, kill_at: tuple[str, int] | None) -> None:
        command = [sys.executable, "-c", script, str(model), str(corpus), str(work)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                what, _, done = line.strip().rpartition(" ")
                if kill_at is not None and what == kill_at[0] and int(done) >= kill_at[1]:
                    os.kill(process.pid, signal.SIGKILL)
                    break
            process.stdout.read()
        assert process.returncode == (-signal.SIGKILL if kill_at else 0)

    work = tmp_path / "work"
    run(folder.path, work, ("letting the model write", 300))
    texts = next(work.glob("texts-*.bin")).stat().st_size
    assert texts > 0 and not list_drafters(folder)[0]
    run(folder.path, work, ("training the drafter", 150))
    assert next(work.glob("texts-*.bin")).stat().st_size > texts
    assert list(work.glob("training-*.npz")) and not list_drafters(folder)[0]
    run(folder.path, work, None)

    other = write_model(tmp_path / "models" / "uninterrupted", seed=0)
    run(other.path, tmp_path / "other-work", None)
    (interrupted,), (straight,) = (list_drafters(model)[0] for model in (folder, other))
    assert interrupted.card.graph_sha256 == straight.card.graph_sha256
    assert interrupted.card.training["steps"] == 230
