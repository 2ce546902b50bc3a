"""Small tokenizers of every kind that models use, trained on the spot, and model folders around them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

SPECIALS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HERMES = """{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}
        {{- '\\n' ~ (tool | tojson) }}
    {%- endfor %}
    {{- '\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def corpus() -> Iterator[str]:
    sentence = "the quick brown fox jumps over a lazy dog while 42 agents read their files, write code and call tools"
    words = sentence.split()
    for at in range(400):
        yield " ".join(words[at % 7 :: 1 + at % 5]) + f" {at}.\n"
    yield 'def fed(self, event):\n    return [event]  # naïve Ωmega 漢字かな Привет <tag> {"a": [1, 2]}\n' * 8


def byte_level_bpe() -> Tokenizer:
    """As GPT-2, SmolLM2 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=False)])
    return tokenizer


def llama3_like() -> Tokenizer:
    """Llama 3's split, NFC, and a BOS before every plain text."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def sentencepiece_bpe() -> Tokenizer:
    """As Llama 2's converted tokenizer: spaces become ▁, one is put before every stretch, bytes stand in."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*SPECIALS, *byte_tokens], show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(corpus(), trainer)
    return _with_specials(tokenizer, SPECIALS)


def metaspace_first() -> Tokenizer:
    """As newer sentencepiece conversions: a space only before the first stretch of a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def unigram() -> Tokenizer:
    """As T5 and XLM-R."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(vocab_size=400, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    """As BERT: lower case, no spaces kept, [CLS] and [SEP] around a text."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIALS, show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
    )
    return tokenizer


def normalized_specials() -> Tokenizer:
    """As DeepSeek: no normalizer, and added tokens that count as normalized, some of them overlapping."""
    tokenizer = _untouched(byte_level_bpe())
    tokenizer.add_tokens(
        [
            AddedToken("<|im_start|>", normalized=True, special=True),
            AddedToken("<|im_end|>", normalized=True, special=True),
            AddedToken("<|im_", normalized=True),
            AddedToken("end|><", normalized=False),
            AddedToken("  ", normalized=True),
        ]
    )
    return tokenizer


def greedy_specials() -> Tokenizer:
    """Added tokens that take white space from left or right, or count only as whole words."""
    tokenizer = byte_level_bpe()
    tokenizer.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False),
            AddedToken("<gap>", rstrip=True, normalized=False),
            AddedToken("word", single_word=True, normalized=False),
            AddedToken("<w>", single_word=True, normalized=False),
            AddedToken("</s><s>", normalized=False),
        ]
    )
    return tokenizer


def prepended_specials() -> Tokenizer:
    """A space put before every text, and added tokens that are found only after that."""
    tokenizer = _untouched(sentencepiece_bpe())
    tokenizer.add_tokens([AddedToken("<|im_start|>", normalized=True), AddedToken("<|im_end|>", normalized=True)])
    return tokenizer


def no_specials() -> Tokenizer:
    """Nothing to cut at: every text is tokenized whole."""
    return _untouched(byte_level_bpe())


MAKERS: dict[str, Callable[[], Tokenizer]] = {
    maker.__name__: maker
    for maker in (
        byte_level_bpe,
        llama3_like,
        sentencepiece_bpe,
        metaspace_first,
        unigram,
        wordpiece,
        normalized_specials,
        greedy_specials,
        prepended_specials,
        no_specials,
    )
}


@cache
def sample(kind: str) -> Tokenizer:
    """The tokenizer of that kind, made once a run."""
    return MAKERS[kind]()


def write_folder(folder: Path, tokenizer: Tokenizer, template: str | None = CHATML) -> Path:
    """A model folder's text side."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def _with_specials(tokenizer: Tokenizer, specials: list[str]) -> Tokenizer:
    """The tokenizer with only these added tokens, and no pre-tokenizer."""
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = [token for token in settings["added_tokens"] if token["content"] in specials]
    settings["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(settings))


def _untouched(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer without added tokens; their ids stay in its vocabulary."""
    settings = json.loads(tokenizer.to_str())
    settings["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(settings))
