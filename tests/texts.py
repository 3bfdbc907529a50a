"""Tiny models of images and texts as folders, with a tokenizer of a few words."""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.families import build, save

WORDS = ["a", "photo", "of", "the", "beach", "forest", "snow", ".", "painting"]
BEGIN, END = 48, 49  # as in the tiny text configuration


def text_folder(family: str, folder: Path) -> Path:
    """A random model of two towers, saved as its users publish it."""
    save(build(family), folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a word, with the first and last tokens that the tiny text tower expects."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[PAD]", *WORDS])}
    vocabulary |= {"<s>": BEGIN, "</s>": END}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", BEGIN), ("</s>", END)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        bos_token="<s>",
        eos_token="</s>",
    ).save_pretrained(folder)
