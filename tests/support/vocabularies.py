"""Small tokenizers of every kind that stores tokens otherwise than as text."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, CLIPTokenizer, PerceiverTokenizer, PreTrainedTokenizerFast

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
SPOKEN = ["naïve 你好 😀 été", "你好 世界", "the cat sat", "日本語"]


def byte_level(*, merges: bool = False, words: bool = True, decodes: bool = True, **options: Any) -> Any:
    """Of GPT-2's kind: one token per byte, or `merges` that also cut through characters.

    Without `words` the whole text is one word. One that does not decode joins what it stores.
    """
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    if decodes:
        tokenizer.decoder = decoders.ByteLevel()
    if merges:
        trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=BYTES, show_progress=False)
        tokenizer.train_from_iterator(SPOKEN, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def byte_pieces(*, prefix: bool = True) -> Any:
    """Of Llama-2's kind, or without `prefix` of Gemma's: ``▁`` and letters, ``<0xE4>`` for other bytes."""
    names = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"navetcsh"]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend("▁")] if prefix else []), normalizers.Replace(" ", "▁")]
    )
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def unigram() -> Any:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60,
        show_progress=False,
        unk_token="<unk>",
        special_tokens=["<unk>"],
        initial_alphabet=list("é😀世界"),
    )
    tokenizer.train_from_iterator(SPOKEN, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def word_pieces() -> Any:
    letters = [*string.ascii_lowercase, *"éï"]
    names = [
        "[UNK]",
        *letters,
        *(f"##{letter}" for letter in letters),
        *"你好世界日本語😀",
        *["##好", "##界", "##本", "##語"],
    ]
    vocabulary = {name: number for number, name in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")


def clip() -> Any:
    """Byte-level with ``</w>`` at the end of a word."""
    names = [*BYTES, *(f"{letter}</w>" for letter in BYTES), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={name: number for number, name in enumerate(names)}, merges=[])


KINDS: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte level with merges": lambda: byte_level(merges=True),
    "byte level, no words": lambda: byte_level(merges=True, words=False),
    "byte level, no decoder": lambda: byte_level(decodes=False),
    "byte pieces": byte_pieces,
    "byte pieces without prefix": lambda: byte_pieces(prefix=False),
    "unigram": unigram,
    "word pieces": word_pieces,
    "clip": clip,
    "byt5": ByT5Tokenizer,
    "perceiver": PerceiverTokenizer,
}
