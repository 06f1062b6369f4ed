"""The generated caption world is a pure function of its arguments and says what it shows."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeduet_shared import world
from edgeduet_shared.errors import DataError
from edgeduet_shared.world import CaptionLevel, Spec

specs = st.builds(
    Spec,
    shape=st.sampled_from(world.SHAPES),
    colour=st.sampled_from(tuple(world.COLOURS)),
    texture=st.sampled_from(world.TEXTURES),
    background=st.sampled_from(tuple(world.BACKGROUNDS)),
    count=st.integers(1, 3),
    style=st.sampled_from(world.STYLES),
)


@settings(max_examples=60, deadline=None)
@given(specs, st.integers(0, 2**32 - 1))
def test_a_picture_is_a_pure_function_of_spec_and_seed(spec: Spec, seed: int) -> None:
    first = world.render(spec, np.random.default_rng(seed))
    again = world.render(spec, np.random.default_rng(seed))
    assert first.shape == (32, 32, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, again)
    assert first.std() > 5  # something is drawn


def test_another_seed_draws_another_picture() -> None:
    spec = Spec("star", "red")
    pictures = {world.render(spec, np.random.default_rng(seed)).tobytes() for seed in range(20)}
    assert len(pictures) == 20


@pytest.mark.parametrize("style", world.STYLES)
def test_the_object_has_the_colour_that_the_spec_names(style: str) -> None:
    """The mean difference between a red and a blue picture is red against blue, in every style."""
    rng = np.random.default_rng
    red = np.mean([world.render(Spec("circle", "red", style=style), rng(i)) for i in range(20)], 0)
    blue = np.mean([world.render(Spec("circle", "blue", style=style), rng(i)) for i in range(20)], 0)
    centre = (red - blue)[12:20, 12:20].mean((0, 1))
    assert centre[0] > 15
    assert centre[2] < -15


def test_captions_tell_more_with_each_level_and_all_wordings_agree() -> None:
    spec = Spec("star", "orange", "striped", "grass", 2)
    wordings = {level: world.captions(spec, level) for level in CaptionLevel}
    assert wordings[CaptionLevel.SHAPE][0] == "a star"
    assert wordings[CaptionLevel.COLOUR][0] == "an orange star"
    assert wordings[CaptionLevel.TEXTURE][0] == "a striped star"
    assert wordings[CaptionLevel.COUNT][0] == "two stars"
    assert wordings[CaptionLevel.FULL][0] == "two striped orange stars on grass"
    for texts in wordings.values():
        assert len(texts) == len(world.TEMPLATES)
        assert all(texts[0] in text for text in texts)


@pytest.mark.parametrize(
    ("shape", "plural"), [("cross", "crosses"), ("fish", "fish"), ("heart", "hearts"), ("moon", "moons")]
)
def test_captions_use_the_right_plural(shape: str, plural: str) -> None:
    text = world.captions(Spec(shape, "red", count=3), CaptionLevel.COUNT)[0]
    assert text == f"three {plural}"


def test_24_of_120_pairs_are_held_out_two_of_each_shape() -> None:
    assert len(world.HELD_OUT_PAIRS) == 24
    for shape in world.TRAINED_SHAPES:
        assert sum(pair[0] == shape for pair in world.HELD_OUT_PAIRS) == 2
    assert {pair[1] for pair in world.HELD_OUT_PAIRS} == set(world.COLOURS)


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_random_specs_respect_the_held_out_pairs(seed: int, held_out: bool) -> None:
    spec = world.random_spec(np.random.default_rng(seed), held_out=held_out)
    assert ((spec.shape, spec.colour) in world.HELD_OUT_PAIRS) is held_out
    assert spec.style in world.TRAINED_STYLES


def test_world_images_are_labelled_in_class_order() -> None:
    images, labels = world.world_images("cartoon", ("ring", "moon", "house"), 4, seed=3)
    assert images.shape == (12, 32, 32, 3)
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_asking_for_more_classes_or_pictures_never_changes_a_picture() -> None:
    few, _ = world.world_images("photo", ("star", "ring"), 3, seed=7)
    many, _ = world.world_images("photo", ("moon", "ring", "star"), 5, seed=7)
    assert np.array_equal(few[:3], many[10:13])
    assert np.array_equal(few[3:], many[5:8])


def test_styles_and_seeds_draw_different_pictures() -> None:
    base, _ = world.world_images("photo", ("star",), 2, seed=7)
    assert not np.array_equal(base, world.world_images("photo", ("star",), 2, seed=8)[0])
    assert not np.array_equal(base, world.world_images("cartoon", ("star",), 2, seed=7)[0])


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: Spec("sqare", "red"), "did you mean 'square'"),
        (lambda: Spec("square", "rad"), "did you mean 'red'"),
        (lambda: Spec("square", "red", count=4), "1 to 3"),
        (lambda: world.world_images("fotos", ("star",), 1, 0), "no style 'fotos'"),
        (lambda: world.world_images("photo", ("stra",), 1, 0), "did you mean 'star'"),
    ],
)
def test_unknown_words_are_one_clear_line(call, hint: str) -> None:
    with pytest.raises(DataError, match=hint) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_picture_costs_a_few_milliseconds() -> None:
    """CPU time, so that a busy machine does not fail the test; about 1 ms where it was written."""
    started = time.process_time()
    world.world_images("photo", world.SHAPES, 10, seed=0)
    assert (time.process_time() - started) / 200 < 0.02
