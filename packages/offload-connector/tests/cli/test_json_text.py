import json

import pytest

from offload_connector.cli.json_text import read_json

GUIDE = """{
  "kv_connector": "RecomputeCPUOffloadConnector",
  "kv_connector_extra_config": {
    "cpu_bytes_to_use_per_rank": 17179869184,
  }
}"""


def fault(text):
    value, findings = read_json(text, "--option")
    return value, [(f.line, f.column, f.message, f.corrected) for f in findings]


def test_good_json_has_no_findings():
    assert fault('{"a": [1, true, null]}') == ({"a": [1, True, None]}, [])


def test_a_trailing_comma_is_shown_with_the_line_to_write():
    value, ((line, column, message, corrected),) = fault(GUIDE)
    assert (line, column) == (4, 45)
    assert GUIDE.splitlines()[3][column - 1] == ","
    assert "comma before '}'" in message
    assert corrected == '    "cpu_bytes_to_use_per_rank": 17179869184'
    assert value == json.loads(GUIDE.replace("184,", "184"))


@pytest.mark.parametrize("text", ['{"a": [1, 2,]}', '{"a": 1 , }', '{"a": 1,\n\n}'])
def test_trailing_commas_anywhere(text):
    _, ((line, column, _, _),) = fault(text)
    assert text.splitlines()[line - 1][column - 1] == ","


def test_every_fault_is_shown_at_its_own_place():
    value, faults = fault("{'a': True,\n 'b': [None,], // why\n}")
    assert value == {"a": True, "b": [None]}
    assert [(line, column) for line, column, _, _ in faults] == [
        *((1, 2), (1, 7), (2, 2), (2, 8), (2, 12), (2, 16)),
        (2, 14),  # a trailing comma only once the comment behind it is gone
    ]


@pytest.mark.parametrize(
    ("text", "place", "message", "corrected"),
    [
        ("", (1, 1), "the text is empty", None),
        ("  \n", (1, 1), "the text is empty", None),
        ("{recompute_scheduler_enable: true}", (1, 2), "needs double quotes", '{"recompute_scheduler_enable": true}'),
        ('{"a": 1\n "b": 2}', (1, 8), "a comma is missing", '{"a": 1,'),
        ('{"a": [1, 2}', (1, 12), "'[' is closed by '}'; write ']'", '{"a": [1, 2]'),
        ('{"a": {"b": [1', (1, 15), "]}} is missing", '{"a": {"b": [1]}}'),
        ('{"a": 1}}', (1, 9), "text behind the end", None),
        ("{“a”: 1}", (1, 2), "double quotes", '{"a": 1}'),
        ('{"a" 1}', (1, 6), "not JSON", None),
        ('{"a": 1 /* two\nlines */ }', (1, 9), "no comments", None),
        ('{"a": ', (1, 6), "} is missing", None),
    ],
)
def test_each_kind_of_fault(text, place, message, corrected):
    _, ((line, column, found, write), *_) = fault(text)
    assert message in found
    assert (line, column) == place
    if corrected is not None:
        assert write == corrected


def test_a_key_given_twice_is_a_warning():
    value, findings = read_json('{"a": 1, "b": {"a": 2, "a": 3}}', "--option")
    assert value == {"a": 1, "b": {"a": 3}}
    assert [f.level for f in findings] == ["warning"]
    assert "'a' is there twice" in findings[0].message
