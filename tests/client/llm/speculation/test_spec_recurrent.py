"""The drafter on the target's last hidden state: one graph call a draft, evidence, whose drafter it is."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edgeduet_client.llm.block_matrix import DenseMatrix
from edgeduet_client.llm.distribution import CERTAIN, Distribution
from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.graph import build_graph
from edgeduet_client.llm.local_model import LocalModel
from edgeduet_client.llm.model_folder import ModelFolder, write_manifest
from edgeduet_client.llm.quantisation import QuantisedWeights
from edgeduet_client.llm.speculation.draft import Draft
from edgeduet_client.llm.speculation.drafter_artefact import DrafterFolder
from edgeduet_client.llm.speculation.drafter_dataset import LABELS, DrafterDataset, ReadText
from edgeduet_client.llm.speculation.drafter_export import export, export_to
from edgeduet_client.llm.speculation.drafter_training import DrafterConfig, initial_parameters
from edgeduet_client.llm.speculation.proposal_law import law_of
from edgeduet_client.llm.speculation.recurrent import FACTORY, RecurrentDrafter, RecurrentSession
from edgeduet_client.llm.speculation.recurrent_graph import QuantisedProduct
from edgeduet_client.llm.speculation.target_tables import embedding_table, head_table, target_tables
from edgeduet_client.llm.speculation.text import CommittedText
from tiny_llm import TINY, RandomWeights, write_model

RNG = np.random.default_rng(0)
WIDTH = TINY.hidden_width
VOCABULARY = np.array(sorted({1, *range(10, 200, 3)}))


def random_texts(rng: np.random.Generator, count: int = 3, length: int = 40) -> list[ReadText]:
    return [
        ReadText(
            domain="prose",
            greedy=True,
            answer=5,
            tokens=rng.integers(0, 300, length).astype(np.int32),
            hidden=rng.standard_normal((length, WIDTH)).astype(np.float16),
            label_ids=rng.choice(VOCABULARY, (length, LABELS)).astype(np.int32),
            label_masses=np.full((length, LABELS), 1 / LABELS, np.float16),
        )
        for _ in range(count)
    ]


@dataclass(frozen=True)
class Made:
    folder: ModelFolder
    model: LocalModel
    config: DrafterConfig


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model with an untrained drafter, which is as good as any for what is asked here."""
    folder = write_model(tmp_path_factory.mktemp("models") / "target", seed=0)
    config = DrafterConfig(hidden_width=WIDTH, inner_width=32, seed=5)
    dataset = DrafterDataset(random_texts(np.random.default_rng(1)), target_tables(folder, VOCABULARY))
    export(initial_parameters(config), dataset, folder, "recurrent")
    return Made(folder, LocalModel.open(folder, threads=1), config)


def opened(made: Made, **options: object) -> RecurrentDrafter:
    return FACTORY.open("recurrent", {"threshold": 0.0, **options}, made.model)


def answered(seed: int, length: int = 30) -> CommittedText:
    """A text whose answer has hidden states."""
    rng = np.random.default_rng(seed)
    text = CommittedText([5, 6, 7])
    tokens = rng.integers(10, 290, length).tolist()
    targets = [Distribution(np.array([token]), CERTAIN) for token in tokens]
    text.extend(tokens, targets, rng.standard_normal((length, WIDTH)).astype(np.float32))
    return text


def cut(text: CommittedText, start: int) -> CommittedText:
    """The text as it was when it had ``start`` tokens."""
    past = CommittedText(text.tokens[: text.prompt_length])
    places = range(text.prompt_length, start)
    past.extend(
        text.tokens[text.prompt_length : start],
        [text.target(place) for place in places],
        np.stack([text.hidden(place) for place in places]),
    )
    return past


@pytest.mark.parametrize("threshold", [0.0, 0.02, 0.05])
def test_evidence_about_a_past_place_is_the_draft_it_made_there(made: Made, threshold: float) -> None:
    drafter, text = opened(made, threshold=threshold), answered(1)
    starts = list(range(4, 30))
    lengths = set()
    for redraft in drafter.redraft(text, starts, 6):
        draft = drafter.draft(cut(text, redraft.start), 6, RNG)
        assert redraft.tokens == draft.tokens
        assert draft.laws == (None,) * len(draft.tokens)
        lengths.add(len(draft.tokens))
    assert threshold == 0 or len(lengths) > 1  # some drafts ended early, others did not


def test_a_longer_draft_begins_with_the_shorter_one(made: Made) -> None:
    drafter, text = opened(made), answered(2)
    drafts = [drafter.draft(text, length, RNG).tokens for length in range(1, 9)]
    for shorter, longer in pairwise(drafts):
        assert longer[: len(shorter)] == shorter


def test_it_proposes_only_ids_of_its_vocabulary(made: Made) -> None:
    drafter, text = opened(made), answered(3)
    assert set(drafter.draft(text, 16, RNG).tokens) <= set(VOCABULARY.tolist())


def test_a_draft_ends_with_the_end_of_text(made: Made) -> None:
    text = answered(4)
    free = opened(made).draft(text, 8, RNG).tokens
    session = RecurrentSession(made.folder.path / "drafters/recurrent/drafter.onnx", made.folder.path)
    ending = RecurrentDrafter("d", session, VOCABULARY, eos_ids=[free[2]], threshold=0.0)
    assert ending.draft(text, 8, RNG).tokens == free[: free.index(free[2]) + 1]


def test_behind_the_prompt_itself_there_is_nothing_to_draft_from(made: Made) -> None:
    assert opened(made).draft(CommittedText([5, 6, 7]), 4, RNG) == Draft()


def test_drawn_drafts_are_drawn_from_the_laws_they_state(made: Made) -> None:
    drafter, text = opened(made, temperature=3.0), answered(5)
    first = [drafter.draft(text, 2, np.random.default_rng(seed)) for seed in range(300)]
    law = first[0].laws[0]
    assert law is not None and 1 < len(law.ids) <= len(VOCABULARY)
    counts = np.array([sum(draft.tokens[0] == token for draft in first) for token in law.ids])
    assert counts.sum() == 300
    spread = np.sqrt(300 * law.probabilities * (1 - law.probabilities))
    assert (np.abs(counts - 300 * law.probabilities) < 5 * spread + 1).all()


def test_evidence_about_drawn_drafts_is_its_law_along_the_text(made: Made) -> None:
    drafter, text = opened(made, temperature=3.0), answered(6)
    places = list(range(4, 28))
    for redraft in drafter.redraft(text, places, 3):
        assert redraft.laws is not None and len(redraft.laws) == 3
        draft = drafter.draft(cut(text, redraft.start), 1, RNG)
        law = draft.laws[0]
        assert law is not None
        np.testing.assert_array_equal(redraft.laws[0].ids, law.ids)
        np.testing.assert_allclose(redraft.laws[0].probabilities, law.probabilities, rtol=1e-6)


def test_whether_a_drawn_draft_goes_on_depends_on_the_law_alone(made: Made) -> None:
    drafter, text = opened(made, temperature=1.0, threshold=0.03), answered(7)
    for start in range(4, 28):
        past = cut(text, start)
        drafts = [drafter.draft(past, 1, np.random.default_rng(seed)) for seed in range(8)]
        assert len({len(draft.tokens) for draft in drafts}) == 1


@pytest.mark.parametrize("quantisation", ["none", "int8", "w8a8", "int4"])
def test_the_tables_are_those_the_target_computes_with(tmp_path: Path, quantisation: str) -> None:
    folder = write_model(tmp_path / "model", seed=2)
    weights = QuantisedWeights(RandomWeights(TINY, 2), quantisation, keep_blocks=False)  # type: ignore[arg-type]
    build_graph(TINY, weights, folder.path)
    ids = np.array([0, 7, 299, 7])
    for name, table in (("embedding", embedding_table(folder)), ("head", head_table(folder))):
        np.testing.assert_allclose(table.rows(ids), weights.matrix(name).dense()[ids], atol=1e-6)


class TiedWeights(RandomWeights):
    """The head is the embedding."""

    def matrix(self, name: str) -> DenseMatrix:
        assert name != "head"
        return super().matrix(name)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    tied = type(TINY)(**{**TINY.__dict__, "tied_head": True, "embedding_scale": 3.0})
    build_graph(tied, TiedWeights(tied, 2), folder.path)
    ids = np.array([4, 200])
    np.testing.assert_allclose(embedding_table(folder).rows(ids), 3 * head_table(folder).rows(ids), rtol=1e-6)


matrices = arrays(np.float32, (12, 7), elements=st.floats(-4, 4, width=32))


@settings(deadline=None)
@given(weight_KN=matrices, reach_K=arrays(np.float32, 12, elements=st.floats(0, 50, width=32)), seed=st.integers(0, 99))
def test_a_product_in_8_bits_is_close_to_the_exact_one(weight_KN: np.ndarray, reach_K: np.ndarray, seed: int) -> None:
    product = QuantisedProduct(weight_KN, reach_K)
    x_K = np.random.default_rng(seed).uniform(-1, 1, 12).astype(np.float32) * reach_K
    inside = x_K / product.divisors_K
    assert (np.abs(inside) <= 1 + 1e-5).all()
    codes = np.rint(inside * 127)
    found = codes @ product.codes_KN.astype(np.float32) * product.scales_N
    # Half a step of each factor, times the largest the other can be.
    spread_KN = np.abs(weight_KN) * product.divisors_K[:, None]
    bound = (spread_KN + spread_KN.max(axis=0)).sum(axis=0) / 127
    assert (np.abs(found - x_K @ weight_KN) <= bound + 1e-4).all()


@settings(deadline=None)
@given(logits=arrays(np.float32, 9, elements=st.floats(-20, 20, width=32)), threshold=st.floats(0, 0.99))
def test_a_law_is_a_distribution_over_the_vocabulary_or_nothing(logits: np.ndarray, threshold: float) -> None:
    ids = np.arange(3, 21, 2)
    law = law_of(logits, ids, temperature=0.8, threshold=threshold)
    weights = np.exp((logits.astype(np.float64) - logits.max()) / 0.8)
    surest = 1 / weights.sum()
    if law is None:
        assert surest < threshold * (1 + 1e-4)
    else:
        assert surest > threshold * (1 - 1e-4)
        assert law.probabilities.sum() == pytest.approx(1) and (law.probabilities > 0).all()
        assert ids[logits.argmax()] in law.ids and set(law.ids) <= set(ids)


def test_a_drafter_of_another_target_is_refused_in_one_line(tmp_path: Path, made: Made) -> None:
    other = LocalModel.open(write_model(tmp_path / "other", seed=9, name="other"), threads=1)
    with pytest.raises(ModelError, match="was made for 'tiny'") as refusal:
        FACTORY.open("d", {"path": str(made.folder.path / "drafters" / "recurrent")}, other)
    assert "\n" not in str(refusal.value)


def test_another_import_of_the_same_weights_can_take_it_over(tmp_path: Path, made: Made) -> None:
    folder = write_model(tmp_path / "model", seed=0, name="smaller")
    build_graph(TINY, QuantisedWeights(RandomWeights(TINY, 0), "int8", keep_blocks=False), folder.path)
    facts = folder.manifest.model_dump(exclude={"files"})
    write_manifest(folder.path, facts)
    folder = ModelFolder.open(folder.path)
    drafter = DrafterFolder.open(made.folder.path / "drafters" / "recurrent", made.folder.manifest)
    export_to(drafter, folder, "recurrent")
    model = LocalModel.open(folder, threads=1)
    same = [
        FACTORY.open("recurrent", {"threshold": 0.0}, model).draft(answered(seed), 1, RNG)
        == opened(made).draft(answered(seed), 1, RNG)
        for seed in range(40)
    ]
    assert sum(same) > 30  # its tables are rounded otherwise


@pytest.mark.parametrize("options", [{"threshold": 1.0}, {"temperature": 0}, {"pth": "x"}])
def test_wrong_options_are_refused(made: Made, options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match="drafter recurrent"):
        FACTORY.open("recurrent", options, made.model)


def test_a_drafter_that_is_not_there_is_said(made: Made) -> None:
    with pytest.raises(ModelError, match="did you mean 'recurrent'"):
        FACTORY.open("recurent", {}, made.model)
