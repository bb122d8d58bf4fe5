"""Batched decoding: each row's answer is what it would be alone, and what Transformers' own generate gives."""

import dataclasses
import itertools

import pytest
import torch

from peagle.errors import VerifierError
from peagle.regenerate.generation import generate, has_plain_cache, sample
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.source import GenerationSettings
from tests import fakes

LENGTHS = (5, 40, 17, 33, 9)
GREEDY = GenerationSettings(max_new_tokens=14, eos_ids=(), temperature=0.0, top_p=1.0, tail_tokens=0)
SHALLOW = {"num_layers": 3, "tie_word_embeddings": False}


def prompts():
    return [fakes.random_row(f"row-{n}", n, 2, 260, n).input_ids for n in LENGTHS]


def load(folder):
    return TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")


def answers(verifier, rows, settings, batch_size=8, seeds=None):
    found = dict(generate(verifier, rows, settings, seeds or list(range(len(rows))), batch_size))
    return [found[i] for i in range(len(rows))]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory):
    return load(fakes.tiny_verifier(tmp_path_factory.mktemp("verifier"), "qwen3", **SHALLOW))


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss", "granite", "qwen2_5_vl"])
def test_greedy_answers_equal_transformers_generate(tmp_path, family):
    verifier = load(fakes.tiny_verifier(tmp_path, family, num_layers=3))
    rows = prompts()[:3]
    for ids, mine in zip(rows, answers(verifier, rows, GREEDY)):
        given = torch.tensor([ids])
        with torch.no_grad():
            theirs = verifier.model.generate(
                input_ids=given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=14,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert mine.ids == theirs[0, len(ids) :].tolist()
        assert mine.finish_reason == "length"


def test_a_recurrent_family_answers_rows_of_other_lengths_apart(tmp_path):
    verifier = load(fakes.tiny_verifier(tmp_path, "qwen3_next", num_layers=4))
    assert not has_plain_cache(verifier)
    rows = [*prompts()[:2], prompts()[0][::-1]]
    settings = GenerationSettings(max_new_tokens=5, eos_ids=(), temperature=0.0, top_p=1.0, tail_tokens=0)
    together = answers(verifier, rows, settings)
    assert [a.ids for a in together] == [answers(verifier, [ids], settings)[0].ids for ids in rows]


def test_padding_and_batches_do_not_change_an_answer(verifier):
    rows = prompts()
    alone = [answers(verifier, [ids], GREEDY)[0] for ids in rows]
    assert answers(verifier, rows, GREEDY, batch_size=2) == alone
    assert answers(verifier, rows, GREEDY, batch_size=8) == alone


def test_rows_leave_the_batch_at_their_end_token_without_disturbing_the_others(verifier):
    rows = prompts()
    free = answers(verifier, rows, GREEDY)
    ends = tuple({free[0].ids[3], free[1].ids[9], free[2].ids[1]})
    settings = GenerationSettings(max_new_tokens=14, eos_ids=ends, temperature=0.0, top_p=1.0, tail_tokens=0)
    for whole, cut in zip(free, answers(verifier, rows, settings)):
        end = next((i + 1 for i, token in enumerate(whole.ids) if token in ends), None)
        assert cut.ids == whole.ids[:end]
        assert cut.finish_reason == ("length" if end is None else "stop")
        assert cut.tail_ids == []


def test_the_tail_is_the_verifiers_continuation_past_the_end(verifier):
    rows = prompts()
    free = answers(
        verifier, rows, GenerationSettings(max_new_tokens=19, eos_ids=(), temperature=0.0, top_p=1.0, tail_tokens=0)
    )
    ends = (free[0].ids[3], free[1].ids[9])
    for whole, kept in zip(
        free,
        answers(
            verifier,
            rows,
            dataclasses.replace(GREEDY, eos_ids=ends, tail_tokens=5),
        ),
    ):
        assert len(kept.tail_ids) == 5
        assert kept.ids + kept.tail_ids == whole.ids[: len(kept.ids) + 5]


def test_the_verifiers_limit_ends_an_answer_and_its_tail(tmp_path):
    verifier = load(fakes.tiny_verifier(tmp_path, "llama", max_position_embeddings=44, num_layers=2))
    found = answers(
        verifier,
        prompts(),
        dataclasses.replace(GREEDY, max_new_tokens=10, tail_tokens=3),
    )
    assert [(len(a.ids), len(a.tail_ids)) for a in found] == [(10, 3), (4, 0), (10, 3), (10, 1), (10, 3)]


def test_a_sampled_answer_depends_on_its_seed_not_on_its_batch(verifier):
    settings = GenerationSettings(max_new_tokens=10, eos_ids=(), temperature=1.0, top_p=0.95, tail_tokens=0)
    rows = prompts()
    alone = [answers(verifier, [ids], settings, seeds=[i])[0] for i, ids in enumerate(rows)]
    assert answers(verifier, rows, settings, seeds=list(range(5))) == alone
    other = answers(verifier, rows, settings, seeds=list(range(100, 105)))
    assert sum(a.ids != b.ids for a, b in zip(alone, other)) >= 4


def test_sampling_over_all_numbers_gives_the_models_distribution():
    logits = torch.tensor([[2.0, 0.5, -1.0, 0.0, 1.0]])
    count = 20_000
    uniforms = (torch.arange(count) + 0.5) / count
    for temperature, top_p in itertools.product((0.5, 1.0, 2.0), (0.3, 0.8, 1.0)):
        drawn = sample(logits.expand(count, -1), temperature, top_p, uniforms)
        share = torch.bincount(drawn, minlength=5) / count
        expected = (logits[0] / temperature).softmax(-1)
        ranked, order = expected.sort(descending=True)
        kept = order[: int((ranked.cumsum(-1) < top_p).sum()) + 1]
        mask = torch.zeros(5).index_fill(0, kept, 1.0)
        expected = expected * mask / (expected * mask).sum()
        assert (share - expected).abs().max() < 1e-3


def test_sampling_never_draws_beyond_the_kept_tokens_at_the_edges():
    logits = torch.tensor([[5.0, 5.0, -50.0, -50.0]])
    for number in (0.0, 0.4999999, 0.5, 0.9999999):
        assert int(sample(logits, 1.0, 0.9, torch.tensor([number]))) in (0, 1)
    assert int(sample(logits, 1.0, 1e-9, torch.tensor([0.999]))) in (0, 1)


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
