"""Tiny models with seeded random weights, written to disk in the Hugging Face layout that vLLM loads.

A family is a small function from a seed to a model; `family` puts it in the registry. All families share one byte-level
tokenizer (a token is a byte), so a prompt of n ASCII characters has n tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

VOCAB_SIZE = 512
SPECIAL_TOKENS = {"<s>": 0, "</s>": 1, "<pad>": 2}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

Builder = Callable[[int], "PreTrainedModel"]
FAMILIES: dict[str, Builder] = {}


def family(name: str) -> Callable[[Builder], Builder]:
    """Register a builder under ``name``; it takes a seed and returns a model in the dtype it is to be saved in."""

    def register(builder: Builder) -> Builder:
        FAMILIES[name] = builder
        return builder

    return register


def fill(model: torch.nn.Module, seed: int, std: float = 0.08) -> None:
    """Draw every weight matrix from N(0, std²); vectors (norms, biases) keep their initial values.

    The usual initialisation (std 0.02) makes a random model repeat one token; 0.08 keeps its greedy output varied, so
    that a wrong KV block shows up as a different token.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std, generator=generator)


def llama_model(seed: int, **shape: int) -> PreTrainedModel:
    """A Llama of this ``shape``, fields of LlamaConfig, with the tokenizer's vocabulary and random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB_SIZE,
            bos_token_id=SPECIAL_TOKENS["<s>"],
            eos_token_id=SPECIAL_TOKENS["</s>"],
            pad_token_id=SPECIAL_TOKENS["<pad>"],
            **shape,
        )
    )
    fill(model, seed)
    return model


@family("llama")
def llama(seed: int) -> PreTrainedModel:
    """4 layers of full attention, 4 KV heads of 32, float32: 4 KiB of KV a token."""
    return llama_model(
        seed,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=4096,
    )


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer whose tokens are the 256 bytes and three special tokens, with a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = dict(SPECIAL_TOKENS)
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)


def write_model(directory: Path, name: str = "llama", seed: int = 0) -> Path:
    """Write the model of family ``name`` and its tokenizer into ``directory`` (made if missing) and return it.

    Raises ValueError for a family that is not registered.
    """
    if name not in FAMILIES:
        raise ValueError(f"unknown model family {name!r}: choose one of {', '.join(sorted(FAMILIES))}")
    from transformers.utils import logging

    logging.disable_progress_bar()
    directory.mkdir(parents=True, exist_ok=True)
    FAMILIES[name](seed).save_pretrained(directory)
    write_tokenizer(directory)
    return directory
