"""The tiny models on disk: seeded, loadable, byte-level."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from pd_integration.models import FAMILIES, write_model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def test_same_seed_gives_the_same_weights(llama: Path, tmp_path: Path) -> None:
    first = load_file(llama / "model.safetensors")
    again = load_file(write_model(tmp_path / "again") / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(first[name].equal(again[name]) for name in first)


def test_another_seed_gives_other_weights(llama: Path, tmp_path: Path) -> None:
    first = load_file(llama / "model.safetensors")
    other = load_file(write_model(tmp_path / "other", seed=1) / "model.safetensors")
    assert not first["model.layers.0.mlp.up_proj.weight"].equal(other["model.layers.0.mlp.up_proj.weight"])


def test_a_token_is_a_byte(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    text = "Hello, wörld\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_chat_template_ends_where_the_assistant_speaks(llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "user: hi\nassistant: "


def test_unknown_family_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown model family 'lama'.*llama"):
        write_model(tmp_path, "lama")
    assert "llama" in FAMILIES
