"""Where the gate's texts come from, and how they are split."""

import json
import sys
from pathlib import Path

import polib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgeduet_client.llm.errors import ModelError
from edgeduet_client.llm.families import Family
from edgeduet_client.llm.gate_texts import (
    GateText,
    folder_texts,
    package_texts,
    part_test_texts,
    split_by_source,
    with_latin,
    without_latin,
)


def installed(folder: Path, monkeypatch: pytest.MonkeyPatch, *, dialogues: str | None = None) -> None:
    """Put small packages of the real layout on the path."""
    messages = {
        "ar": {"Enter a valid value.": "أدخل قيمة صحيحة.", "Save it": "احفظ", "%(n)s items here": "%(n)s عناصر"},
        "zh_Hans": {"Enter a valid value.": "请输入一个有效的值。", "The URL is wrong": "URL 不正确"},
    }
    for locale, translations in messages.items():
        catalogue = folder / "django" / "conf" / "locale" / locale / "LC_MESSAGES" / "django.mo"
        catalogue.parent.mkdir(parents=True)
        content = polib.MOFile()
        for source, translation in translations.items():
            content.append(polib.MOEntry(msgid=source, msgstr=translation))
        content.save(str(catalogue))
    (folder / "django" / "__init__.py").write_text("raise RuntimeError('looked at, never imported')")
    if dialogues is not None:
        data = folder / "chatterbot_corpus" / "data" / "chinese"
        data.mkdir(parents=True)
        (data / "ai.yml").write_text(dialogues, encoding="utf-8")
        (folder / "chatterbot_corpus" / "__init__.py").write_text("")
    # in front of whatever else is installed
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])


def test_catalogues_become_translations_of_clean_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch)
    assert package_texts(["ar"], per_language=9) == [
        GateText(
            "Translate from English to Arabic.\n\nEnglish: Enter a valid value.\n\nArabic:",
            "أدخل قيمة صحيحة.",
            "ar",
            "Enter a valid value.",
        )
    ]


def test_dialogues_become_question_and_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = "categories: [ai]\nconversations:\n- - 什么是人工智能？\n  - 人工智能是工程与科学的分支。\n- - 只有一句\n"
    installed(tmp_path, monkeypatch, dialogues=turns)
    texts = package_texts(["zh-hans"], per_language=9)
    assert GateText("什么是人工智能？", "人工智能是工程与科学的分支。", "zh-hans", "什么是人工智能？") in texts
    assert len(texts) == 3


def test_a_larger_number_contains_the_texts_of_a_smaller_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, dialogues="conversations: []")
    two, one = package_texts(["zh-hans"], per_language=2), package_texts(["zh-hans"], per_language=1)
    assert len(two) == 2
    assert one == two[:1]


def test_a_missing_package_is_named_with_the_command_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "django", raising=False)
    with pytest.raises(ModelError, match="pip install django"):
        package_texts(["ar"], per_language=1)


def test_an_unknown_language_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no packaged texts for tlh"):
        package_texts(["ar", "tlh"], per_language=1)


def test_a_folder_gives_its_lines_and_objects(tmp_path: Path) -> None:
    (tmp_path / "ar.txt").write_text("مرحبا بكم\n\nأهلا وسهلا\n", encoding="utf-8")
    rows = [{"prompt": "hi", "response": "hello", "language": "en"}, {"text": "just a text"}]
    (tmp_path / "mine.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "notes.md").write_text("not read")
    assert folder_texts(tmp_path) == [
        GateText("", "مرحبا بكم", "ar", "مرحبا بكم"),
        GateText("", "أهلا وسهلا", "ar", "أهلا وسهلا"),
        GateText("hi", "hello", "en", "hi"),
        GateText("", "just a text", "und", "just a text"),
    ]
    assert len(folder_texts(tmp_path, per_language=1)) == 3


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2: not JSON"),
        ('["a"]', "line 2: expected an object"),
        ('{"answer": "x"}', "line 2: expected an object"),
        ('{"response": 3}', "line 2: expected an object"),
        ('{"prompt": "x"}', "line 2: the field response"),
    ],
)
def test_a_line_that_is_no_text_is_named(line: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(ModelError, match=says):
        folder_texts(tmp_path)


def test_a_folder_without_texts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds no text"):
        folder_texts(tmp_path)
    with pytest.raises(ModelError, match="is no folder"):
        folder_texts(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"cannot read .*a\.txt as UTF-8"):
        folder_texts(tmp_path)


def text(response: str, source: str = "s", language: str = "ru") -> GateText:
    return GateText("p", response, language, source)


def test_texts_are_parted_by_latin_letters_in_the_response() -> None:
    russian, mixed, english = text("Привет"), text("Откройте URL"), text("Hello")
    assert without_latin([russian, mixed, english]) == [russian]
    assert with_latin([russian, mixed, english]) == [mixed]
    assert mixed.families == {Family.LOW_RES, Family.LATIN}


@given(st.lists(st.tuples(st.text(max_size=4), st.sampled_from(["ar", "ru", "ko"])), max_size=40), st.integers(0, 9))
def test_a_source_is_never_on_both_sides_and_more_texts_move_none(rows: list[tuple[str, str]], seed: int) -> None:
    texts = [text(f"{source}!", source, language) for source, language in rows]
    train, held_out = split_by_source(texts, held_out=0.4, seed=seed)
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, texts))
    assert not {t.source for t in train} & {t.source for t in held_out}
    part, _ = split_by_source(texts[: len(texts) // 2], held_out=0.4, seed=seed)
    assert set(part) <= set(train)


def test_the_share_held_out_is_about_what_was_asked_and_changes_with_the_seed() -> None:
    texts = [text("x", str(i)) for i in range(2000)]
    first, second = (split_by_source(texts, held_out=0.2, seed=seed)[1] for seed in (0, 1))
    assert 320 < len(first) < 480
    assert first != second


def test_test_texts_are_a_fifth_and_independent_of_the_splits_of_trainings() -> None:
    texts = [text("x", str(i)) for i in range(2000)]
    rest, test = part_test_texts(texts)
    assert 320 < len(test) < 480
    for seed in range(3):
        _, validation = split_by_source(rest, held_out=0.2, seed=seed)
        assert not set(validation) & set(test)
        assert 240 < len(validation) < 400
