"""Bug reports M01 to M16 and T05: templates, masks, vocabulary sizes, through `peagle prepare`."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle.data.prepared import load_prepared
from peagle.data.readers import read_conversations
from peagle.data.template import render_prompt
from tests.data.toys import (
    BOTH_TAGS,
    CHATML,
    CHATML_TAGGED,
    COUNTER,
    FAMILIES,
    HARMONY,
    LLAMA3,
    OPENING,
    QWEN3,
    QWEN3_THINKING,
    R1,
    chat,
    family_tokenizer,
    model_folder,
    prepare,
    rejected,
    supervised,
    toy_tokenizer,
    write_lines,
)


def rows_of(folder: Path):
    prepared = load_prepared(folder)
    return [prepared.row(i) for i in range(len(prepared))]


def test_M01_labels_are_the_reply_from_its_second_token_on_and_nothing_else(chatml, tmp_path):
    ids = [10, 11, 12, 13, 20, 21, 22, 23, 2]
    data = write_lines(tmp_path / "d.jsonl", [{"id": "r", "input_ids": ids, "loss_mask": [0] * 4 + [1] * 5}])
    assert prepare(chatml, data, tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    # features at pair slot i, embedding of token i + 1, label token i + 2: the target state is y_{i+1}
    trainable = [(p - 1, row.input_ids[p + 1]) for p in row.label_positions()]
    assert trainable == [(3, 21), (4, 22), (5, 23), (6, 2)]


@pytest.mark.parametrize("family", list(FAMILIES))
def test_M03_spans_come_from_the_template_in_use(tmp_path, family):
    tokenizer = family_tokenizer(family)
    end = FAMILIES[family][4]
    replies = ["The user asked the assistant [/INST] <|eot", "assistant user <start_of turn> <|im_start"]
    row = chat("user: what does assistant <end_of say", replies[0], "and the user <|im_end", replies[1])
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_folder(tmp_path / "model", tokenizer), data, tmp_path / "out") == 0
    rows = rows_of(tmp_path / "out")
    assert len(rows) == (2 if family in ("harmony", "qwen3") else 1)  # these two rewrite history
    found = [text for r in rows for text in supervised(r, tokenizer)]
    before = {"harmony": "<|channel|>final<|message|>", "qwen3": "<think>\n\n</think>\n\n", "mistral": " "}
    assert found == [before.get(family, "") + reply + end for reply in replies]


def test_M03_words_of_other_families_in_the_text_change_nothing(model_of, tmp_path):
    marks = "<|start_header_id|>assistant<|end_header_id|> [INST] <start_of_turn>model <|start|>assistant"
    data = write_lines(tmp_path / "d.jsonl", [chat(marks, "reply one", "user " + marks, marks + " assistant")])
    assert prepare(model_of(CHATML), data, tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert supervised(row, toy_tokenizer(None)) == ["reply one<|im_end|>", marks + " assistant<|im_end|>"]


def test_M04_masks_with_and_without_generation_tags_are_equal_and_not_zero(model_of, tmp_path):
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer is 42 .", "why", "I think so")])
    rows = []
    for name, template in (("plain", CHATML), ("tagged", CHATML_TAGGED)):
        assert prepare(model_of(template), data, tmp_path / name) == 0
        rows += rows_of(tmp_path / name)
    assert rows[0].input_ids == rows[1].input_ids
    assert rows[0].loss_mask == rows[1].loss_mask
    assert sum(rows[0].loss_mask) > 8
    assert load_prepared(tmp_path / "tagged").summary["mask_from"] == {"generation tags": 1}
    assert load_prepared(tmp_path / "plain").summary["mask_from"] == {"prefixes": 1}


def test_M04_tags_that_leave_out_the_end_token_still_supervise_it(model_of, tmp_path):
    template = CHATML_TAGGED.replace(
        "{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}",
        "{{ message['content'] }}{%- endgeneration -%}{{ '<|im_end|>' }}",
    )
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(model_of(template), data, tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    assert supervised(row, toy_tokenizer(None)) == ["The answer<|im_end|>"]


def test_M04_tags_that_mark_nothing_end_in_an_error_that_says_so(model_of, tmp_path, capsys):
    template = CHATML_TAGGED.replace(
        "{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}",
        "{%- generation -%}{%- endgeneration -%}{{ message['content'] + '<|im_end|>' }}",
    )
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(model_of(template), data, tmp_path / "out") == 2
    assert "0 of" in capsys.readouterr().err


@pytest.mark.parametrize("template", [BOTH_TAGS, QWEN3_THINKING, R1], ids=["both tags", "qwen3 thinking", "r1"])
def test_M07_a_self_generated_reply_is_prompt_ids_plus_generated_ids(model_of, tmp_path, template):
    how = {}
    if template is R1:
        specials = ("<|User|>", "<|Assistant|>", "<|begin|>", "<|im_end|>")
        how = {"specials": specials, "bos": "<|begin|>"}
    model, tokenizer = model_of(template, **how), toy_tokenizer(template, **how)
    generated = "work </think> answer"
    data = write_lines(tmp_path / "d.jsonl", [chat("hello world", generated)])
    assert prepare(model, data, tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out")
    (conversation,) = read_conversations([str(data)], None)
    prompt = render_prompt(tokenizer, conversation.opening())
    reply = tokenizer.encode(generated + "<|im_end|>", add_special_tokens=False)
    assert row.input_ids[: len(prompt) + len(reply)] == prompt + reply
    assert row.loss_mask[: len(prompt) + len(reply)] == [0] * len(prompt) + [1] * len(reply)
    text = tokenizer.decode(row.input_ids)
    assert text.count("<think>") == text.count("</think>") == 1


def test_M08_reasoning_of_the_last_turn_is_in_the_text_and_supervised(model_of, tmp_path):
    row = chat("hello", "So 42 .")
    row["messages"][1]["reasoning_content"] = "I think that we can do it"
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(QWEN3), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    tokenizer = toy_tokenizer(QWEN3)
    assert found.input_ids == tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert supervised(found, tokenizer) == ["<think>\nI think that we can do it\n</think>\n\nSo 42 .<|im_end|>"]


@pytest.mark.parametrize("inline", [True, False])
def test_M08_reasoning_that_the_template_drops_is_put_back_as_it_was_generated(model_of, tmp_path, inline):
    how = {"specials": ("<|User|>", "<|Assistant|>", "<|begin|>", "<|im_end|>"), "bos": "<|begin|>"}
    row = chat("hello", "<think>\nwork\n</think>\n\nSo 42 ." if inline else "So 42 .")
    if not inline:
        row["messages"][1]["reasoning_content"] = "work"
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(R1, **how), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    tokenizer = toy_tokenizer(R1, **how)
    assert supervised(found, tokenizer) == ["work\n</think>\n\nSo 42 .<|im_end|>"]
    assert tokenizer.decode(found.input_ids) == (
        "<|begin|><|User|>hello<|Assistant|><think>\nwork\n</think>\n\nSo 42 .<|im_end|>"
    )


def test_M09_a_template_that_rewrites_history_gives_a_row_per_reply_as_the_server_would_ask(model_of, tmp_path):
    row = chat("hello", "first answer", "and then", "second answer")
    row["messages"][1]["reasoning_content"] = "thinking one"
    row["messages"][3]["reasoning_content"] = "thinking two"
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(QWEN3), data, tmp_path / "out") == 0
    first, second = rows_of(tmp_path / "out")
    tokenizer = toy_tokenizer(QWEN3)
    for found, turns, reply in (
        (first, row["messages"][:1], "<think>\nthinking one\n</think>\n\nfirst answer<|im_end|>"),
        (second, row["messages"][:3], "<think>\nthinking two\n</think>\n\nsecond answer<|im_end|>"),
    ):
        prompt = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
        assert found.input_ids[: len(prompt)] == prompt
        assert not any(found.loss_mask[: len(prompt)])
        assert supervised(found, tokenizer) == [reply]
    assert "thinking one" not in tokenizer.decode(second.input_ids)
    assert [r.row_id[-2:] for r in (first, second)] == ["/1", "/2"]
    assert first.conversation == second.conversation == first.row_id[:-2]


def test_N01_D13_conversations_are_a_column_of_their_own(model_of, tmp_path):
    """Ids with `#` and `/` in them, and the very same chat twice."""
    rows = [{**chat("hello", f"answer {i}"), "id": f"chat#{i}"} for i in range(3)] + [
        {**chat("hello", "answer 0"), "id": "chat#0"}
    ]
    assert prepare(model_of(CHATML), write_lines(tmp_path / "d.jsonl", rows), tmp_path / "out") == 0
    found = rows_of(tmp_path / "out")
    assert len({row.row_id for row in found}) == 4
    assert len({row.conversation for row in found}) == 3
    # Rows that come with their tokens say it themselves, as `regenerate` writes them.
    ready = [{"id": f"a/{i}", "conversation": "a", "input_ids": [1, 2, i], "loss_mask": [0, 1, 1]} for i in (3, 4)]
    assert prepare(model_of(CHATML), write_lines(tmp_path / "r.jsonl", ready), tmp_path / "ready") == 0
    assert [row.conversation for row in rows_of(tmp_path / "ready")] == ["a", "a"]


def test_M09_history_that_is_rewritten_letter_for_letter_is_seen(model_of, tmp_path):
    shout = CHATML.replace(
        "message['content'] + '<|im_end|>",
        "(message['content'] if loop.last or message['role'] == 'user' else message['content'] | upper) + '<|im_end|>",
    )
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "answer one", "why", "answer two")])
    assert prepare(model_of(shout), data, tmp_path / "out") == 0
    rows, tokenizer = rows_of(tmp_path / "out"), toy_tokenizer(None)
    assert [supervised(row, tokenizer) for row in rows] == [["answer one<|im_end|>"], ["answer two<|im_end|>"]]
    assert "ANSWER ONE" in tokenizer.decode(rows[1].input_ids)


def test_M09_an_unstable_rendering_is_refused(model_of, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [chat("a", "b c", "d", "e f")])
    assert prepare(model_of(COUNTER), data, tmp_path / "out") == 2
    shown = capsys.readouterr().err
    assert "unstable template" in shown
    assert "'1 turns" in shown
    assert "'2 turns" in shown
    assert rejected(tmp_path / "out")[0]["reason"] == "unstable template"


def test_M11_an_opening_tag_of_the_generation_prompt_is_not_supervised(model_of, tmp_path):
    with_block = chat("hello", "<think>\nwork</think>answer")
    without = chat("hello", "answer only")
    data = write_lines(tmp_path / "d.jsonl", [with_block, without])
    assert prepare(model_of(OPENING), data, tmp_path / "out") == 0
    first, second = rows_of(tmp_path / "out")
    tokenizer = toy_tokenizer(OPENING)
    assert supervised(first, tokenizer) == ["work</think>answer<|im_end|>"]
    assert supervised(second, tokenizer) == ["answer only<|im_end|>"]
    notes = load_prepared(tmp_path / "out").summary["notes"]
    assert notes == {"reply does not open with the prompt's think block": 1}


def test_M12_all_channels_and_each_end_marker_of_a_harmony_reply_are_supervised(tmp_path):
    tokenizer = family_tokenizer("harmony")
    call = {"function": {"name": "look", "arguments": {"q": "sky"}}}
    row = {
        "messages": [
            {"role": "user", "content": "what"},
            {"role": "assistant", "thinking": "need a look", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "blue sky"},
            {"role": "assistant", "thinking": "it is blue", "content": "Blue ."},
            {"role": "user", "content": "sure"},
            {"role": "assistant", "content": "Yes sir"},
        ]
    }
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_folder(tmp_path / "model", tokenizer), data, tmp_path / "out") == 0
    rows = rows_of(tmp_path / "out")
    channel, message, start = "<|channel|>", "<|message|>", "<|start|>assistant"
    assert [supervised(r, tokenizer) for r in rows] == [
        [
            f"{channel}analysis{message}need a look<|end|>{start} to=functions.look{channel}commentary{message}"
            '{"q": "sky"}<|call|>'
        ],
        [f"{channel}analysis{message}it is blue<|end|>{start}{channel}final{message}Blue .<|return|>"],
        [f"{channel}final{message}Yes sir<|return|>"],
    ]
    last = tokenizer.decode(rows[2].input_ids)
    assert f"{start}{channel}final{message}Blue .<|end|>" in last
    assert "blue sky" not in "".join(text for r in rows for text in supervised(r, tokenizer))


def test_M13_one_bos_where_template_and_tokenizer_both_print_it(model_of, tmp_path):
    specials = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    how = {"specials": specials, "eos": "<|eot_id|>", "bos": "<|begin_of_text|>", "adds_bos": True}
    tokenizer = toy_tokenizer(LLAMA3, **how)
    row = chat("hello", "The answer")
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(LLAMA3, **how), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    assert found.input_ids.count(tokenizer.bos_token_id) == 1
    assert found.input_ids == tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    (conversation,) = read_conversations([str(data)], None)
    assert render_prompt(tokenizer, conversation.opening()) == found.input_ids[: found.loss_mask.index(1)]


def test_M13_a_tokenizer_that_appends_eos_adds_none_to_a_chat(model_of, tmp_path):
    how = {"adds_eos": True}
    tokenizer = toy_tokenizer(CHATML, **how)
    row = chat("hello", "The answer")
    data = write_lines(tmp_path / "d.jsonl", [row])
    assert prepare(model_of(CHATML, **how), data, tmp_path / "out") == 0
    (found,) = rows_of(tmp_path / "out")
    one_step = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
    assert found.input_ids == one_step
    assert found.input_ids.count(tokenizer.eos_token_id) == one_step.count(tokenizer.eos_token_id) == 2


def test_M13_rendered_text_keeps_one_bos_and_the_eos_of_the_tokenizer(model_of, tmp_path):
    specials = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    how = {"specials": specials, "eos": "<|eot_id|>", "bos": "<|begin_of_text|>", "adds_bos": True, "adds_eos": True}
    tokenizer = toy_tokenizer(LLAMA3, **how)
    text = tokenizer.apply_chat_template(chat("hello", "The answer")["messages"], tokenize=False)
    data = write_lines(tmp_path / "d.jsonl", [{"text": text}, {"text": text.removeprefix("<|begin_of_text|>")}])
    assert prepare(model_of(LLAMA3, **how), data, tmp_path / "out", "--mode", "text") == 0
    for row in rows_of(tmp_path / "out"):
        assert row.input_ids.count(tokenizer.bos_token_id) == 1
        assert row.input_ids.count(tokenizer.eos_token_id) == 3
        assert supervised(row, tokenizer) == ["The answer<|eot_id|>"]


def test_M14_rows_without_a_supervised_token_after_truncation_are_dropped_and_none_left_is_an_error(
    chatml, tmp_path, capsys
):
    long = chat("hello world " * 100, "so be it")
    data = write_lines(tmp_path / "long.jsonl", [long] * 8)
    assert prepare(chatml, data, tmp_path / "out", "--seq-length", "64") == 2
    shown = capsys.readouterr().err
    assert "8 no supervised token within --seq-length" in shown
    assert "Raise --seq-length (now 64)" in shown
    assert not (tmp_path / "out" / "summary.json").exists()
    data = write_lines(tmp_path / "more.jsonl", [long] * 8 + [chat("hi", "hello world")])
    assert prepare(chatml, data, tmp_path / "out", "--seq-length", "64") == 0
    summary = load_prepared(tmp_path / "out").summary
    assert (summary["kept"], summary["dropped"]) == (1, {"no supervised token within --seq-length": 8})
    assert all(sum(row.loss_mask) for row in rows_of(tmp_path / "out"))


def test_M16_text_of_another_family_stops_with_an_example(chatml, tmp_path, capsys):
    tokenizer = family_tokenizer("llama3")
    text = tokenizer.apply_chat_template(chat("hello", "The answer")["messages"], tokenize=False)
    data = write_lines(tmp_path / "d.jsonl", [{"text": text}] * 3)
    assert prepare(chatml, data, tmp_path / "out", "--mode", "text") == 2
    shown = capsys.readouterr().err
    assert " tokens supervised" in shown
    assert "0 of " in shown
    assert "start_header_id" in shown
    assert "<|im_start|>assistant" in shown


def test_M16_a_tiny_supervised_share_is_warned_of(chatml, tmp_path, capsys):
    data = write_lines(tmp_path / "d.jsonl", [chat("hello world " * 400, "yes")])
    assert prepare(chatml, data, tmp_path / "out") == 0
    assert "% of the tokens are supervised; look at them" in capsys.readouterr().err


def test_T05_tables_are_sized_by_the_model_and_padded_ids_come_last(model_of, tmp_path):
    from peagle.data.draft_vocab import choose_vocab

    tokenizer = toy_tokenizer(CHATML)
    size = len(tokenizer) + 28
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer is 42 .")])
    assert prepare(model_of(CHATML, vocab_size=size), data, tmp_path / "out") == 0
    prepared = load_prepared(tmp_path / "out")
    assert len(prepared.frequencies) == size
    for draft_size in (64, len(tokenizer), size - 1):
        vocab = choose_vocab(prepared, tokenizer, [tokenizer.eos_token_id], draft_size)
        assert len(vocab.t2d) == size
        assert int(vocab.t2d.sum()) == draft_size == vocab.size
        assert bool(vocab.t2d[prepared.frequencies > 0].all())
        padded = vocab.ids[vocab.ids >= len(tokenizer)]
        assert len(padded) == max(0, draft_size - len(tokenizer))
        assert int((vocab.d2t + range_like(vocab.d2t)).max()) < size
        assert int((vocab.d2t + range_like(vocab.d2t)).min()) >= 0


def range_like(values):
    import torch

    return torch.arange(len(values))


def test_harmony_is_in_the_list_of_families():
    assert FAMILIES["harmony"][0] is HARMONY


def test_M13_a_template_without_bos_is_said(model_of, tmp_path, capsys):
    how = {"bos": "<|endoftext|>", "adds_bos": True}
    data = write_lines(tmp_path / "d.jsonl", [chat("hello", "The answer")])
    assert prepare(model_of(CHATML, **how), data, tmp_path / "out") == 0
    assert "prints no <|endoftext|>" in capsys.readouterr().err
    (found,) = rows_of(tmp_path / "out")
    assert toy_tokenizer(CHATML, **how).bos_token_id not in found.input_ids
