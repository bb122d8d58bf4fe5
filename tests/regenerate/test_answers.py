"""Answers of a group: each is what it would be alone, and what Transformers' own generate gives."""

import pytest
import torch

from peagle.errors import VerifierError
from peagle.regenerate.answers import EngineAnswers
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import GenerationSettings, Prompt
from tests import fakes

LENGTHS = (5, 40, 17, 33, 9)


def settings(max_new_tokens=14, eos_ids=(), temperature=0.0, top_p=1.0, tail_tokens=0):
    return GenerationSettings(
        max_new_tokens=max_new_tokens, eos_ids=eos_ids, temperature=temperature, top_p=top_p, tail_tokens=tail_tokens
    )


GREEDY = settings()
SHALLOW = {"num_layers": 3, "tie_word_embeddings": False}


def prompts():
    return [fakes.random_row(f"row-{n}", n, 2, 260, n).input_ids for n in LENGTHS]


def load(folder):
    return TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")


def answers(verifier, rows, how, batch_size=8, seeds=None):
    seeds = seeds or range(len(rows))
    asked = [Prompt(str(i), ids, seed) for i, (ids, seed) in enumerate(zip(rows, seeds))]
    source = EngineAnswers(verifier, how, batch_size)
    found = {one.row_id: one.generation for one in source.answers(asked, {prompt.row_id for prompt in asked})}
    return [found[prompt.row_id] for prompt in asked]


def own_answer(verifier, ids, limit):
    """By Transformers, no token ending it."""
    given = torch.tensor([ids])
    with torch.no_grad():
        out = verifier.model.generate(
            input_ids=given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load(fakes.tiny_verifier(tmp_path_factory.mktemp("verifier"), "qwen3", **SHALLOW))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "granite", "qwen2_5_vl"])
def test_greedy_answers_equal_transformers_generate(tmp_path, family):
    verifier = load(fakes.tiny_verifier(tmp_path, family, num_layers=3))
    rows = prompts()[:3]
    for ids, mine in zip(rows, answers(verifier, rows, GREEDY)):
        assert mine.ids == own_answer(verifier, ids, 14)
        assert mine.finish_reason == "length"


def test_a_recurrent_family_answers_its_rows_apart(tmp_path):
    verifier = load(fakes.tiny_verifier(tmp_path, "qwen3_next", num_layers=4))
    rows = [*prompts()[:2], prompts()[0][::-1]]
    how = settings(5, (), 0.0, 1.0, 0)
    together = answers(verifier, rows, how)
    for ids, mine in zip(rows, together):
        assert mine.ids == own_answer(verifier, ids, 5)


def test_padding_and_batches_do_not_change_an_answer(verifier):
    rows = prompts()
    alone = [answers(verifier, [ids], GREEDY)[0] for ids in rows]
    assert answers(verifier, rows, GREEDY, batch_size=2) == alone
    assert answers(verifier, rows, GREEDY, batch_size=8) == alone


def test_rows_leave_the_batch_at_their_end_token_without_disturbing_the_others(verifier):
    rows = prompts()
    free = answers(verifier, rows, GREEDY)
    ends = tuple({free[0].ids[3], free[1].ids[9], free[2].ids[1]})
    how = settings(14, ends, 0.0, 1.0, 0)
    for whole, cut in zip(free, answers(verifier, rows, how)):
        end = next((i + 1 for i, token in enumerate(whole.ids) if token in ends), None)
        assert cut.ids == whole.ids[:end]
        assert cut.finish_reason == ("length" if end is None else "stop")
        assert cut.tail_ids == []


def test_the_tail_is_the_verifiers_continuation_past_the_end(verifier):
    rows = prompts()
    free = answers(verifier, rows, settings(19, (), 0.0, 1.0, 0))
    ends = (free[0].ids[3], free[1].ids[9])
    for whole, kept in zip(free, answers(verifier, rows, settings(14, ends, 0.0, 1.0, 5))):
        assert len(kept.tail_ids) == 5
        assert kept.ids + kept.tail_ids == whole.ids[: len(kept.ids) + 5]


def test_the_verifiers_limit_ends_an_answer_and_its_tail(tmp_path):
    verifier = load(fakes.tiny_verifier(tmp_path, "llama", max_position_embeddings=44, num_layers=2))
    found = answers(verifier, prompts(), settings(10, (), 0.0, 1.0, 3))
    assert [(len(a.ids), len(a.tail_ids)) for a in found] == [(10, 3), (4, 0), (10, 3), (10, 1), (10, 3)]


def test_a_sampled_answer_depends_on_its_seed_not_on_its_batch(verifier):
    how = settings(10, (), 1.0, 0.95, 0)
    rows = prompts()
    alone = [answers(verifier, [ids], how, seeds=[i])[0] for i, ids in enumerate(rows)]
    assert answers(verifier, rows, how, seeds=list(range(5))) == alone
    other = answers(verifier, rows, how, seeds=list(range(100, 105)))
    assert sum(a.ids != b.ids for a, b in zip(alone, other)) >= 4


def test_plain_attention_is_restored_after_an_answer(verifier):
    before = verifier.decoder.config._attn_implementation
    answers(verifier, prompts()[:2], GREEDY)
    assert verifier.decoder.config._attn_implementation == before == "sdpa"


def test_a_verifier_with_damaged_weights_is_refused_instead_of_answering_nonsense(tmp_path):
    verifier = load(fakes.tiny_verifier(tmp_path, "qwen3", **SHALLOW))
    with torch.no_grad():
        verifier.layers[1].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(VerifierError, match="its logits are NaN or infinite"):
        answers(verifier, prompts()[:1], GREEDY)
