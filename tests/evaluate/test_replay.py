import random
from dataclasses import replace

import pytest
import torch

from peagle.engine import Answer, Engine, Request, Sampling
from peagle.evaluate.counts import count_by_context, count_datasets, pool
from peagle.evaluate.prompts import Item
from peagle.evaluate.replay import Recorded, Replayed, ReplayedPass, chain_logits, replay
from peagle.evaluate.replay_check import Agreement, Judge, disagreement, on_the_spot, with_tails
from peagle.verifier.local import TransformersVerifier
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_head
from tests.engine.helpers import random_drafter
from tests.fakes import tiny_verifier

GREEDY = Sampling(temperature=0.0, top_p=1.0)
EOS = 2


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> TransformersVerifier:
    """A verifier of nine tokens: a random drafter guesses right often, so that passes of every length occur."""
    folder = tiny_verifier(
        tmp_path_factory.mktemp("verifier"), num_layers=3, hidden_size=32, vocab_size=9, eos_token_id=2, seed=2
    )
    return TransformersVerifier(load_verifier_config(str(folder), False), "float32", "cpu")


def items(count: int, limit: int, seed: int) -> list[Item]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(9) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    return [
        Item(row_id=f"row-{i}", source=f"set-{i % 2}", prompt_ids=prompt, recorded_ids=None, tail_ids=[], limit=limit)
        for i, prompt in enumerate(prompts)
    ]


def decode(verifier, drafter, asked: list[Item], depth: int, eos: list[int], sampling: Sampling) -> list[Answer]:
    engine = Engine(verifier.model, drafter, depth, eos, sampling, 4)
    return engine.generate([Request(item.prompt_ids, item.limit) for item in asked])


def recorded_of(verifier, drafter, tailed: list[Item]) -> list[Recorded]:
    return list(on_the_spot(verifier, drafter.config.aux_layer_ids, tailed, None))


def taught(verifier, kind: str = "peagle", num_steps: int = 60, **changes):
    """A drafter that has seen a few of the verifier's answers, so that drafts are accepted to every depth."""
    drafter = random_drafter(verifier.model, kind, num_layers=1, **changes)
    asked = items(16, 30, seed=99)
    own = Engine(verifier.model, None, 0, [], GREEDY, 16).generate([Request(i.prompt_ids, 30) for i in asked])
    answered = [replace(i, recorded_ids=a.ids) for i, a in zip(asked, own)]
    records = recorded_of(verifier, drafter, answered)
    optimizer = torch.optim.Adam(drafter.parameters(), 5e-3)
    size = drafter.config.draft_vocab_size
    label_of = torch.full((9,), -100)
    label_of[drafter.to_verifier_ids(torch.arange(size))] = torch.arange(size)
    for step in range(num_steps):
        one = records[step % len(records)]
        ids = torch.tensor(one.ids)
        anchors = torch.arange(one.start - 1, one.end - 5)
        pairs = len(ids) - 1
        loss = torch.zeros(())
        for some, logits in chain_logits(drafter, ids[1:], one.aux_states[:pairs].clone(), anchors, 4, ids[2:]):
            wanted = ids[some[:, None] + 2 + torch.arange(4)]
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), label_of[wanted].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return drafter.eval()


def count(asked: list[Item], answers: list[Answer], depth: int) -> dict:
    """What decoding counted, per data set."""
    passes = [[(one.num_known, one.num_accepted) for one in answer.passes] for answer in answers]
    return count_datasets(
        [(i.source, len(a.ids), count_by_context(p, depth)) for i, a, p in zip(asked, answers, passes)], depth
    )


def total(records: list[Recorded], replayed: list[Replayed], depth: int) -> dict:
    """What replay counted, per data set."""
    return count_datasets([(r.source, r.end - r.start, one.by_context) for r, one in zip(records, replayed)], depth)


@pytest.mark.parametrize("depth", [1, 3, 6])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [("peagle", {}), ("peagle", {"draft_vocab_size": 6}), ("eagle3", {}), ("eagle3", {"norm_output": True})],
)
def test_replay_gives_exactly_the_counts_of_decoding(verifier, kind: str, changes: dict, depth: int):
    drafter = taught(verifier, kind, **changes)
    asked = items(12, 40, seed=depth)
    answers = decode(verifier, drafter, asked, depth, [EOS], GREEDY)
    decoded = count(asked, answers, depth)
    records = recorded_of(verifier, drafter, with_tails(asked, answers, verifier, depth, 4))
    replayed = [replay(drafter, None, recorded, depth, GREEDY) for recorded in records]
    assert total(records, replayed, depth) == decoded
    assert all(disagreement(r, o, a, torch.float32) is None for r, o, a in zip(records, replayed, answers))
    assert sum(one.num_unjudged for one in replayed) == 0
    pooled = pool((one.total for one in decoded.values()), depth)
    assert pooled.num_accepted > 10
    assert sum(count > 0 for count in pooled.histogram) > min(depth, 3)  # passes of many lengths
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


def test_without_a_tail_only_the_last_passes_are_left_out(verifier):
    depth = 4
    drafter = taught(verifier)
    asked = items(8, 30, seed=3)
    answers = decode(verifier, drafter, asked, depth, [], GREEDY)
    no_tails = [replace(i, recorded_ids=a.ids) for i, a in zip(asked, answers)]
    left_out = 0
    for answer, recorded in zip(answers, recorded_of(verifier, drafter, no_tails)):
        one = replay(drafter, None, recorded, depth, GREEDY)
        left_out += one.num_unjudged
        assert one.num_unjudged <= depth
        assert disagreement(recorded, one, answer, torch.float32) is None
        assert [p.num_accepted for p in one.passes] == [p.num_accepted for p in answer.passes][: len(one.passes)]
    assert left_out > 0


def test_an_answer_of_one_token_has_no_pass(verifier):
    drafter = random_drafter(verifier.model, num_layers=1)
    recorded = Recorded(
        row_id="r",
        source="s",
        ids=[4, 5, 2],
        start=2,
        end=3,
        aux_states=torch.zeros(3, drafter.config.aux_size),
        choice_ids=None,
        last_states=None,
    )
    assert replay(drafter, None, recorded, 3, GREEDY).passes == []


def test_tokens_that_the_verifier_would_not_write_are_counted(verifier):
    head = load_head(verifier.verifier_config)
    ids = [3, 4, 5, 6, 7, 8, 3, 4]
    ((_, last),) = verifier.states([ids], (0, 1, 3))
    judge = Judge(head)
    choices = judge.choices(last, ids, torch.arange(2, 7))
    logits = verifier.model(torch.tensor([ids])).logits[0]
    assert choices[2:7].tolist() == logits[2:7].argmax(-1).tolist()
    assert choices[:2].tolist() == [-1, -1]
    assert choices[7] == -1
    assert judge.num_judged == 5
    assert judge.num_foreign == sum(a != b for a, b in zip(choices[2:7].tolist(), ids[3:]))
    assert "not the verifier's own" in judge.note
    assert Judge(head).note is None
    halved = Judge(head.to(torch.device("cpu"), torch.bfloat16))
    halved.num_foreign, halved.num_judged = 1, 100
    assert "rounding of bfloat16" in halved.note
    halved.num_foreign = 9
    assert "only estimates" in halved.note


def test_a_tie_is_decided_as_the_recorded_answer_says(verifier):
    head = load_head(verifier.verifier_config)
    weight = head.weight.clone()
    weight[5] = weight[4]  # tokens 4 and 5 are always level
    tied = replace(head, weight=weight)
    states = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    logits = tied.logits(tied.normed(states))
    place = next(p for p in range(39) if logits[p].argmax() in (4, 5))
    for said in (4, 5):
        ids = [said] * 40
        assert Judge(tied).choices(states, ids, torch.tensor([place]))[place] == said


def test_expected_counts_at_a_temperature_are_those_of_sampled_decoding(verifier):
    """Both are sums over the same sampled answers: the passes are drawn in one and expected in the other."""
    depth, sampling = 3, Sampling(temperature=0.9, top_p=0.95, seed=7)
    drafter = random_drafter(verifier.model, seed=2, num_layers=1, scale=3.0, draft_vocab_size=7)
    asked = items(120, 16, seed=8)
    answers = decode(verifier, drafter, asked, depth, [], sampling)
    other = Sampling(temperature=0.9, top_p=0.95, seed=8)
    tails = Engine(verifier.model, None, 0, [], other, 60).generate(
        [Request([*i.prompt_ids, *a.ids], depth) for i, a in zip(asked, answers)]
    )
    tailed = [replace(i, recorded_ids=a.ids, tail_ids=t.ids) for i, a, t in zip(asked, answers, tails)]
    records = recorded_of(verifier, drafter, tailed)
    head = load_head(verifier.verifier_config)
    replayed = [replay(drafter, head, recorded, depth, sampling) for recorded in records]
    expected = pool((d.total for d in total(records, replayed, depth).values()), depth)
    decoded = pool((d.total for d in count(asked, answers, depth).values()), depth)
    assert decoded.num_drafts > 600
    assert abs(expected.num_drafts - decoded.num_drafts) < 3 * decoded.num_drafts**0.5
    for theirs, ours in zip(decoded.accepted_per_position, expected.accepted_per_position):
        assert abs(theirs - ours) < 4 * (theirs + 1) ** 0.5
    assert decoded.accepted_per_position[1] > 50


def test_a_temperature_near_zero_gives_the_greedy_counts(verifier):
    depth = 3
    drafter = taught(verifier)
    asked = items(6, 25, seed=9)
    answers = decode(verifier, drafter, asked, depth, [], GREEDY)
    tailed = with_tails(asked, answers, verifier, depth, 2)
    records = recorded_of(verifier, drafter, tailed)
    cold = Sampling(temperature=1e-4, top_p=1.0)
    replayed = [replay(drafter, load_head(verifier.verifier_config), recorded, depth, cold) for recorded in records]
    expected = pool((d.total for d in total(records, replayed, depth).values()), depth)
    decoded = pool((d.total for d in count(asked, answers, depth).values()), depth)
    assert expected.num_drafts == pytest.approx(decoded.num_drafts, abs=0.5)
    assert expected.accepted_per_position == pytest.approx(decoded.accepted_per_position, abs=0.5)


def test_a_difference_is_excused_only_by_a_shown_gap(verifier):
    drafter = random_drafter(verifier.model, seed=1, num_layers=1, scale=8.0)
    asked = items(1, 20, seed=5)
    (answer,) = decode(verifier, drafter, asked, 3, [], GREEDY)
    (recorded,) = recorded_of(verifier, drafter, with_tails(asked, [answer], verifier, 3, 1))
    one = replay(drafter, None, recorded, 3, GREEDY)

    def changed(gap: float, runner_up: int, dtype=torch.float32) -> list:
        first = one.passes[0]
        other = (first.draft_ids[0] + 1) % 9
        fake = ReplayedPass(
            num_known=first.num_known,
            num_accepted=3 - first.num_accepted,
            best_ids=[[token, runner_up] for token in (other, *first.draft_ids[1:])],
            best_logits=[[10.0, 10.0 - gap]] * 3,
        )
        found = disagreement(recorded, type(one)([fake, *one.passes[1:]], 0, {}), answer, dtype)
        assert found is not None
        return [found]

    ours = one.passes[0].draft_ids[0]
    assert Agreement(1, 1, changed(5e-5, ours)).equal is True
    assert Agreement(1, 1, changed(2e-4, ours)).equal is False
    assert Agreement(1, 1, changed(5e-5, (ours + 2) % 9)).equal is False
    assert changed(2e-4, ours)[0].gap.value == pytest.approx(2e-4)
    # half precision cannot tell 10.0 and 9.9 apart: no agreement, but no fault either
    halved = changed(0.1, ours, torch.bfloat16)
    assert Agreement(1, 1, halved).equal is False
    assert Agreement(1, 1, halved).is_within_rounding
    assert not changed(0.3, ours, torch.bfloat16)[0].gap.is_within_rounding
    assert not changed(0.1, ours)[0].gap.is_within_rounding
    assert not changed(0.1, (ours + 2) % 9, torch.bfloat16)[0].gap.is_within_rounding
    shorter = disagreement(recorded, type(one)(one.passes[:-1], 0, {}), answer, torch.float32)
    assert Agreement(1, 1, [shorter]).equal is False
    assert Agreement(0, 0, []).equal is None
