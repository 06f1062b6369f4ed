"""The session: rows asked for, rollback, chunks, in-place memory, and what it refuses."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgeduet_client.llm.errors import ModelError, RequestError
from edgeduet_client.llm.session import PREFILL_CHUNK, TargetSession, usable_cores
from tiny_llm import TINY, write_graph

IDS = [int(token) for token in np.random.default_rng(5).integers(0, 300, 200)]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> TargetSession:
    graph = write_graph(tmp_path_factory.mktemp("tiny"))
    return TargetSession(graph, context_length=TINY.context_length, threads=1)


def logits_of(session: TargetSession, ids: list[int]) -> np.ndarray:
    """All rows, from one step on a fresh cache."""
    return session.forward(ids, session.new_cache(), rows=range(len(ids))).logits.copy()


def test_only_the_rows_asked_for_come_back(session: TargetSession) -> None:
    every = logits_of(session, IDS[:9])
    outcome = session.forward(IDS[:9], session.new_cache(), rows=[0, 4, 8], hidden=True)
    np.testing.assert_allclose(outcome.logits, every[[0, 4, 8]], atol=1e-5)
    assert outcome.hidden is not None
    assert outcome.hidden.shape == (3, TINY.hidden_width)
    last = session.forward(IDS[:9], session.new_cache())
    assert last.hidden is None
    np.testing.assert_allclose(last.logits, every[8:], atol=1e-5)
    assert session.forward(IDS[:9], session.new_cache(), rows=()).logits.shape == (0, TINY.vocab_width)


def test_hidden_is_what_the_head_multiplies(session: TargetSession) -> None:
    one = session.forward(IDS[:5], session.new_cache(), rows=range(5), hidden=True)
    assert one.hidden is not None
    head, *_ = np.linalg.lstsq(one.hidden, one.logits, rcond=None)
    two = session.forward(IDS[:5], session.new_cache(), rows=range(5), hidden=True)
    assert two.hidden is not None
    np.testing.assert_allclose(two.hidden @ head, two.logits, atol=1e-3)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(1, 20), min_size=1, max_size=5), garbage=st.integers(1, 20), keep=st.integers(0, 60))
def test_a_cropped_cache_goes_on_like_a_fresh_one(
    session: TargetSession, cuts: list[int], garbage: int, keep: int
) -> None:
    cache = session.new_cache()
    place = 0
    for size in cuts:
        session.forward(IDS[place : place + size], cache)
        place += size
    keep = min(keep, place)
    mark = cache.snapshot()
    session.forward([7] * garbage, cache)
    assert cache.restore(mark) == garbage
    assert cache.crop(keep) == place - keep
    follow = [11, 12, 13]
    cropped = session.forward(follow, cache, rows=range(3)).logits
    np.testing.assert_allclose(cropped, logits_of(session, IDS[:keep] + follow)[keep:], atol=1e-5)


def test_crop_to_a_chunk_border_is_bitwise_a_fresh_prefill(session: TargetSession) -> None:
    cache = session.new_cache()
    session.prefill(IDS, cache)
    cache.crop(PREFILL_CHUNK)
    again = session.prefill(IDS[PREFILL_CHUNK:150], cache).logits
    fresh = session.prefill(IDS[:150], session.new_cache()).logits
    np.testing.assert_array_equal(again, fresh)


def test_what_lies_behind_the_length_is_never_read(session: TargetSession) -> None:
    cache = session.new_cache()
    session.forward(IDS[:30], cache)
    for buffer in cache.buffers:
        buffer[:, :, 30:] = np.nan
    poisoned = session.forward(IDS[30:34], cache, rows=range(4)).logits
    np.testing.assert_allclose(poisoned, logits_of(session, IDS[:34])[30:], atol=1e-5)


@pytest.mark.parametrize("length", [1, PREFILL_CHUNK - 1, PREFILL_CHUNK, PREFILL_CHUNK + 1, 200])
def test_prefill_in_chunks_is_one_step(session: TargetSession, length: int) -> None:
    rows = sorted({0, length // 2, length - 1})
    outcome = session.prefill(IDS[:length], session.new_cache(), rows=rows, hidden=True)
    assert outcome.hidden is not None
    assert len(outcome.hidden) == len(rows)
    np.testing.assert_allclose(outcome.logits, logits_of(session, IDS[:length])[rows], atol=1e-5)


def test_steps_copy_no_cache(session: TargetSession) -> None:
    cache = session.new_cache()
    session.prefill(IDS, cache)
    before = [(id(buffer), buffer.copy()) for buffer in cache.buffers]
    session.forward([1], cache)
    for (identity, old), new in zip(before, cache.buffers, strict=True):
        assert id(new) == identity
        changed = np.flatnonzero((old != new).any(axis=(0, 1, 3)))
        assert changed.tolist() == [200]


def test_bindings_persist_and_do_not_pile_up(session: TargetSession) -> None:
    cache = session.new_cache()
    session.forward([1], cache)
    (first,) = cache.prepared.values()
    session.forward([2], cache)
    assert list(cache.prepared.values()) == [first]
    for size in range(2, 40):
        cache.crop(2)
        session.forward([3] * size, cache)
    assert len(cache.prepared) <= 16


def test_growth_in_the_middle_changes_nothing(session: TargetSession) -> None:
    cache = session.new_cache()
    long = (IDS * 3)[:400]
    for start in range(0, 400, 40):
        logits = session.forward(long[start : start + 40], cache).logits
    assert cache.capacity == 512
    np.testing.assert_allclose(logits, logits_of(session, long)[-1:], atol=1e-5)


def test_threads_with_a_cache_each_do_not_mix(session: TargetSession) -> None:
    results: dict[int, np.ndarray] = {}

    def work(number: int) -> None:
        cache = session.new_cache()
        rows = [session.forward([token], cache).logits[0].copy() for token in IDS[number : number + 60]]
        results[number] = np.array(rows)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = dict(results)
    for number in range(4):
        work(number)
        np.testing.assert_array_equal(together[number], results[number])


def test_a_full_context_is_refused_and_leaves_the_cache_alone(session: TargetSession) -> None:
    cache = session.new_cache()
    session.prefill((IDS * 3)[: TINY.context_length], cache)
    with pytest.raises(RequestError, match="context holds 512 tokens; 512 are in use and 1 more"):
        session.forward([1], cache)
    assert cache.length == 512


def test_an_id_the_model_does_not_have_is_refused_and_leaves_the_cache_alone(session: TargetSession) -> None:
    cache = session.new_cache()
    session.forward(IDS[:4], cache)
    with pytest.raises(ModelError, match=r"failed on tokens 4 to 5: .*320"):
        session.forward([1, TINY.vocab_width], cache)
    assert cache.tokens == IDS[:4]
    np.testing.assert_allclose(session.forward([9], cache).logits, logits_of(session, IDS[:4] + [9])[-1:], atol=1e-5)


def test_threads_default_to_the_usable_cores(tmp_path: Path) -> None:
    graph = write_graph(tmp_path)
    assert TargetSession(graph, context_length=64).threads == min(usable_cores(), 4)
    with pytest.raises(ModelError, match="threads=0"):
        TargetSession(graph, context_length=64, threads=0)


def test_what_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist; import the model again"):
        TargetSession(tmp_path / "model.onnx", context_length=64)
    graph = write_graph(tmp_path)
    graph.with_suffix(".onnx.data").unlink()
    with pytest.raises(ModelError, match=r"cannot load .*model\.onnx: .*; import the model again") as caught:
        TargetSession(graph, context_length=64)
    assert "\n" not in str(caught.value)
    graph.write_bytes(b"not a graph")
    with pytest.raises(ModelError, match="cannot load"):
        TargetSession(graph, context_length=64)


def test_another_graph_is_refused(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    model = helper.make_model(helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", [x], [y]), ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ModelError, match="is no graph that `llm import` wrote"):
        TargetSession(tmp_path / "model.onnx", context_length=64)


def test_a_missing_or_old_onnxruntime_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = write_graph(tmp_path)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        with pytest.raises(ModelError, match=r"needs onnxruntime .*pip install 'edgeduet\[llm\]'"):
            TargetSession(graph, context_length=64)
    import onnxruntime

    monkeypatch.setattr(onnxruntime, "__version__", "1.22.1")
    with pytest.raises(ModelError, match=r"onnxruntime 1\.22\.1 is too old, 1\.23 or newer is needed"):
        TargetSession(graph, context_length=64)
