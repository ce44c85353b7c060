"""Text up to a stop string, however it is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdkv.http.speech import Speech
from pdkv.http.tokenizer import ByteTokenizer


def said(text: str, stops: list[str], silent: tuple[int, ...] = ()) -> tuple[list[str], bool]:
    """Parts of an answer of these bytes, and whether it was stopped."""
    speech, parts = Speech(ByteTokenizer().decoder(), stops, silent), []
    for token in text.encode():
        parts.append(speech.push(token))
        if speech.stopped:
            return parts, True
    return [*parts, speech.flush()], speech.stopped


@given(st.text("ab\u00e9\U0001f40d", max_size=40), st.lists(st.text("ab\u00e9", min_size=1, max_size=4), max_size=3))
def test_nothing_of_a_stop_string_nor_after_it_is_said(text: str, stops: list[str]) -> None:
    parts, stopped = said(text, stops)
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    assert stopped == bool(ends)
    if not ends:
        assert "".join(parts) == text
        return
    # the stop string that is complete first ends it; of several, the one that began first
    seen = text[: min(ends)]
    assert "".join(parts) == seen[: min(seen.find(stop) for stop in stops if stop in seen)]


def test_what_cannot_begin_a_stop_string_is_said_at_once() -> None:
    assert said("abxab", ["abc"])[0] == ["", "", "abx", "", "", "ab"]
    assert said("xy", [])[0] == ["x", "y", ""]


def test_tokens_that_stop_have_no_text() -> None:
    assert "".join(said("ab.", [], (ord("."),))[0]) == "ab"
