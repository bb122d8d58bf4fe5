"""Tokenizers of other kinds: white space as a letter (SentencePiece), slow ones, and templates that need none of it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

from peagle.data.records import Conversation
from peagle.data.template import ChatTemplate
from peagle.data.tokenize import RowTokenizer
from tests.data.toys import CHATML, MISTRAL, TEXT, chat, supervised


class SlowLetters(PreTrainedTokenizer):
    """A slow tokenizer: one token a letter."""

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, **how):
        self.letters = [chr(i) for i in range(32, 127)] + ["\n"]
        super().__init__(eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"], **how)

    @property
    def vocab_size(self):
        return len(self.letters)

    def get_vocab(self):
        return {**{letter: i for i, letter in enumerate(self.letters)}, **self.added_tokens_encoder}

    def _tokenize(self, text, **how):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.letters.index(token)

    def _convert_id_to_token(self, index):
        return self.letters[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)


def metaspace(scheme: str, template: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=bytes_, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    eos = "</s>" if template is MISTRAL else "<|im_end|>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token="<s>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


def rows_of(tokenizer, record):
    conversation = Conversation(
        row_id="r",
        source="s",
        origin="f",
        line=1,
        messages=tuple(record["messages"]),
        tools=(),
        template_options={},
        next_turns=(),
        repairs=(),
    )
    outcome = RowTokenizer(
        template=ChatTemplate(tokenizer, {}),
        marks=None,
        no_template="",
        vocab_size=len(tokenizer),
        seq_length=4096,
        minimum_valid_tokens=1,
    )(conversation)
    assert outcome.rejected is None, outcome.rejected
    return outcome.rows


ROW = chat("hello world", "The answer is 42 .", "why", "I think so")


@pytest.mark.parametrize("template", [CHATML, MISTRAL], ids=["chatml", "mistral"])
@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_tokenizers_that_write_white_space_as_a_letter(scheme, template):
    tokenizer = metaspace(scheme, template)
    rows = rows_of(tokenizer, ROW)
    end = "</s>" if template is MISTRAL else "<|im_end|>"
    found = ["".join(part.split()) for row in rows for part in supervised(row, tokenizer)]
    assert found == [f"Theansweris42.{end}", f"Ithinkso{end}"]
    messages = ROW["messages"]
    for row, turns in zip(rows, ((1, 3) if len(rows) == 2 else (1,))):
        prompt = tokenizer.apply_chat_template(messages[:turns], add_generation_prompt=True, return_dict=False)
        assert row.input_ids[: len(prompt)] == prompt
        assert row.loss_mask.index(1) == len(prompt)


def test_a_slow_tokenizer_gives_the_same_masks():
    tokenizer = SlowLetters()
    tokenizer.chat_template = CHATML
    (row,) = rows_of(tokenizer, ROW)
    assert supervised(row, tokenizer) == ["The answer is 42 .<|im_end|>", "I think so<|im_end|>"]
    assert row.input_ids == tokenizer.apply_chat_template(ROW["messages"], return_dict=False)


def test_a_template_without_any_special_token_ends_replies_at_their_last_letter():
    template = """{%- for message in messages -%}
{{ message['role'] | upper + ': ' + message['content'] + '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ 'ASSISTANT:' }}{%- endif -%}"""
    tokenizer = SlowLetters()
    tokenizer.chat_template = template
    (row,) = rows_of(tokenizer, ROW)
    assert supervised(row, tokenizer) == [" The answer is 42 .", " I think so"]
