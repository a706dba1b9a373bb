"""Texts of others and numbers in our messages; and files of others, read or refused."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from evenpipe.errors import InputError, RunError
from evenpipe.given import LONGEST, plain, plain_lines, read_json, read_toml, shortened, shown, write_text
from evenpipe.words import count, join, quoted

PLAIN = [
    # text, in one line, in lines
    ("schön — 日本語 🎉", "schön — 日本語 🎉", "schön — 日本語 🎉"),
    ("two\n\tlines", "two\\n\\tlines", "two\n\tlines"),
    ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m", "\\x1b[31mred\\x1b[0m"),
    ("\x1b]0;title\x07\x08\r", "\\x1b]0;title\\x07\\x08\\r", "\\x1b]0;title\\x07\\x08\\r"),
    ("\x9b31m\x7f", "\\x9b31m\\x7f", "\\x9b31m\\x7f"),
    ("abc\u202edcba\u2066", "abc\\u202edcba\\u2066", "abc\\u202edcba\\u2066"),
    ("\u2028\udcff\0", "\\u2028\\udcff\\x00", "\\u2028\\udcff\\x00"),
]


def test_controls_are_escapes():
    for text, in_one_line, in_lines in PLAIN:
        assert (plain(text), plain_lines(text)) == (in_one_line, in_lines)


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


SHOWN = [
    (3, "3"),
    ("a'b", '"a\'b"'),
    ("\x1b\u202e", "'\\x1b\\u202e'"),
    (16**5000, "a int that is too large to show"),
    (nested(100_000), "a list that is too large to show"),
]


def test_values_are_shown_in_a_line_and_cut_short():
    for value, text in SHOWN:
        assert shown(value) == text
    for value in ("x" * 10**6, list(range(10**5)), 10**4000, {"a": "b" * 1000}):
        text = shown(value)
        assert LONGEST - 10 < len(text) <= LONGEST
        assert text.startswith(repr(value)[:50]) and " ... " in text
    assert shortened("x" * LONGEST) == "x" * LONGEST


REFUSED = [
    # content, words about TOML, words about JSON
    ("a = 1\na = 2", '{"a": 1, "a": 2}', "overwrite a value|'a' appears twice"),
    (f"a = {'9' * 5000}", f'{{"a": {"9" * 5000}}}', "whole number with thousands of digits"),
    (f"a = {2**63}", f'{{"a": [{2**63}]}}', "whole number beyond 64 bits: 9223372036854775808"),
    (f"a = {'[' * 101}{']' * 101}", f'{{"a": {"[" * 101}{"]" * 101}}}', "more than 100 nested tables or lists"),
    (f"a = {'[' * 90_000}", "[" * 90_000, "more than 100 nested tables or lists"),
    ('a = "\\u0000"', '{"a": "\\u0000"}', "an invalid character"),
    ('"\\u0000" = 1', '{"\\u0000": 1}', "an invalid character"),
]


def test_what_parsers_take_and_nobody_can_use(tmp_path):
    for toml, json, words in REFUSED:
        for read, name, content in ((read_toml, "f.toml", toml), (read_json, "f.json", json)):
            path = tmp_path / name
            path.write_text(content)
            with pytest.raises(InputError, match=f"{re.escape(name)} .*({words})"):
                read(path)
    path = tmp_path / "f.toml"
    path.write_text(f"a = {2**63 - 1}\nb = {-(2**63)}\nc = {'[' * 98}{']' * 98}\n")
    assert read_toml(path)["a"] == 2**63 - 1, "values at the limits are taken"


def test_a_full_disk_is_no_wrong_input(tmp_path, monkeypatch):
    def full(self, *arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(InputError, match="cannot be written: Is a directory"):
        write_text(tmp_path, "")
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="cannot be written: No space left"):
        write_text(tmp_path / "x", "")


COUNTED = [
    (1, "layer", "", "1 layer"),
    (0, "layer", "", "0 layers"),
    (2, "microbatch", "", "2 microbatches"),
    (4, "process", "", "4 processes"),
    (3, "entry", "", "3 entries"),
    (2, "key", "", "2 keys"),
    (2000, "token", ",", "2,000 tokens"),
    (1.0, "activation", "g", "1 activation"),
    (1.5, "activation", "g", "1.5 activations"),
]


def test_numbers_lists_and_quotes() -> None:
    for number, noun, form, says in COUNTED:
        assert count(number, noun, form) == says
    joined = [join(list("abc")), join(["a"]), join([]), join(list("abcd"), 3)]
    assert joined == ["a, b and c", "a", "", "a, b and 2 more"]
    assert quoted("2F0") == "'2F0'" and quoted("x" * 5000) == f"'{'x' * 57}...'"
