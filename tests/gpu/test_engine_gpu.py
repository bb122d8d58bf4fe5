"""The engine and replay on a CUDA device: the verifier's own greedy ids, and equal counts."""

from __future__ import annotations

import pytest
import torch

from peagle.engine import Engine, Request, Sampling
from peagle.evaluate.compare import TransformersBaseline
from peagle.evaluate.prompts import Item
from peagle.evaluate.replay import replay
from peagle.evaluate.replay_check import disagreement, on_the_spot, with_tails
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_head
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_verifier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def prompt(index: int, ids: list[int], limit: int) -> Item:
    return Item(row_id=f"r{index}", source="s", prompt_ids=ids, recorded_ids=None, tail_ids=[], limit=limit)


@pytest.mark.parametrize("kind", ["peagle", "eagle3"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_greedy_ids_are_the_verifiers_own_and_replay_counts_alike(tmp_path, kind: str, batch_size: int):
    folder = tiny_verifier(tmp_path, num_layers=4, vocab_size=12)
    verifier = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cuda")
    drafter = random_drafter(verifier.model.cpu(), kind, vocab_size=12).cuda()
    verifier.model.cuda()
    greedy = Sampling(temperature=0.0, top_p=1.0)
    items = [prompt(i, [3 + i % 9] * (1 + 5 * i), 30) for i in range(6)]
    requests = [Request(item.prompt_ids, item.limit) for item in items]
    answers = Engine(verifier.model, drafter, 4, [2], greedy, batch_size).generate(requests)
    own = TransformersBaseline(verifier.model, [2], greedy)
    assert [answer.ids for answer in answers] == [own.generate([request])[0] for request in requests]
    tailed = with_tails(items, answers, verifier, 4, 4)
    for recorded, answer in zip(on_the_spot(verifier, drafter.config.aux_layer_ids, tailed, None), answers):
        assert disagreement(recorded, replay(drafter, None, recorded, 4, greedy), answer, torch.float32) is None


def test_sampling_and_its_replay_run_on_the_device(tmp_path):
    folder = tiny_verifier(tmp_path, num_layers=4, vocab_size=12)
    verifier = TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cuda")
    drafter = random_drafter(verifier.model.cpu(), vocab_size=12, draft_vocab_size=8).cuda()
    verifier.model.cuda()
    sampling = Sampling(temperature=1.0, top_p=0.9)
    items = [prompt(i, [3 + i], 20) for i in range(6)]
    answers = Engine(verifier.model, drafter, 4, [], sampling, 3).generate([Request(i.prompt_ids, 20) for i in items])
    head = load_head(verifier.verifier_config).to("cuda", torch.float32)
    tailed = with_tails(items, answers, verifier, 4, 4)
    for recorded in on_the_spot(verifier, drafter.config.aux_layer_ids, tailed, None):
        counts = replay(drafter, head, recorded, 4, sampling).by_context
        assert sum(one.num_drafts for one in counts.values()) > 0
