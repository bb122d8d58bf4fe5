"""Claims about the loop: what a step divides by, when the schedule ends, what is refused, what picks the best."""

from __future__ import annotations

import dataclasses
import logging
import math

import pytest
import torch

from peagle.errors import DataError, StoreError, TrainingError
from peagle.train.batches import Pack
from peagle.train.metrics import Best, MetricsLog, StepMetrics, Sums
from tests.train.problem import HIDDEN, config, drafter, row, rows, run


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(one: torch.nn.Module, other: torch.nn.Module, atol: float = 0.0) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(
            tensor, theirs[name], rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_training_learns(kind):
    _, result = run(config(epochs=6, optimizer=kind, batch_size=2), rows(30), rows(5, seed=1))
    assert result.steps[-1].loss < 0.3 * result.steps[0].loss
    assert result.validations[-1].acceptance_length > result.validations[0].acceptance_length > 1
    assert result.progress.epoch == 6


def test_the_same_seed_gives_the_same_weights_and_another_seed_others():
    one, other, third = (run(config(seed=seed), rows(12))[0] for seed in (1, 1, 2))
    assert_same(one, other)
    assert not torch.equal(one.fc.weight, third.fc.weight)


def test_R11_packing_changes_nothing():
    """One pack of all rows, or a pack for each: the same optimizer step (layouts are drawn row by row)."""
    made = rows(6)
    packed, _ = run(config(total_seq_len=512, max_steps=2, batch_size=1), made)
    separate, result = run(config(total_seq_len=40, max_steps=2, batch_size=6), made)
    assert len(result.steps) == 2
    assert_same(packed, separate, atol=1e-12)


def test_R11_the_order_inside_a_pack_changes_nothing():
    made = rows(5)
    one, _ = run(config(total_seq_len=512, epochs=1), made)
    other, _ = run(config(total_seq_len=512, epochs=1), made[::-1])
    assert_same(one, other, atol=1e-12)


@pytest.mark.parametrize(("batch", "accumulation"), [(6, 1), (3, 2), (1, 6)])
def test_accumulation_is_a_larger_batch(batch, accumulation):
    made = rows(12)
    one, _ = run(config(total_seq_len=40, batch_size=6, epochs=1), made)
    other, _ = run(config(total_seq_len=40, batch_size=batch, gradient_accumulation_steps=accumulation, epochs=1), made)
    assert_same(one, other)


def test_R03_the_loss_is_the_mean_over_supervised_slots_whatever_the_prompts_length():
    """10 and 90 supervised tokens in one step weigh 10 to 90, and a prompt weighs nothing."""
    short, long = row("short", 14, 4, 1), row("long", 94, 4, 2)
    _, both = run(config(total_seq_len=128, epochs=1, batch_size=2, down_sample_ratio=1.0), [short, long])
    parts = [
        run(config(total_seq_len=128, epochs=1, down_sample_ratio=1.0), [one])[1].steps[0] for one in (short, long)
    ]
    step = both.steps[0]
    assert step.num_supervised == sum(part.num_supervised for part in parts)
    mean = sum(part.loss * part.num_supervised for part in parts) / step.num_supervised
    assert step.loss == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_R01_a_batch_with_nothing_supervised_adds_nothing(accumulation, monkeypatch):
    """Its packs are put between the others by hand: the loop itself never plans them."""
    import peagle.train.loop as loop

    good, empty = (
        [row(f"g{i}", 20, 3, i) for i in range(4)],
        [row(f"e{i}", 20, 3, 9, supervised=False) for i in range(2)],
    )
    orders = {
        "with": [Pack((r.row.row_id,), 20) for r in (*good[:2], *empty[:accumulation], *good[2:])],
        "without": [Pack((r.row.row_id,), 20) for r in good],
    }
    settings = config(epochs=1, gradient_accumulation_steps=accumulation, scheduler_type="none")
    models, results = {}, {}
    for name, order in orders.items():
        monkeypatch.setattr(loop, "packs", lambda lengths, *_, order=order: order if lengths else [])
        models[name], results[name] = run(settings, [*good, *empty])
    assert results["with"].progress.num_empty == 1
    assert results["with"].progress.step == results["without"].progress.step == 4 // accumulation
    assert all(math.isfinite(step.loss) for step in results["with"].steps)
    assert_same(models["with"], models["without"])


def test_rows_without_a_supervised_token_are_passed_over():
    made = rows(4)
    one, _ = run(config(), made)
    other, _ = run(config(), [*made, row("silent", 30, 5, 3, supervised=False)])
    assert_same(one, other)


def test_a_data_set_with_nothing_supervised_is_refused():
    with pytest.raises(TrainingError, match="no row has a supervised token"):
        run(config(), [row("silent", 30, 5, 3, supervised=False)])


@pytest.mark.parametrize(("num_packs", "epochs", "expected"), [(100, 2, 50), (102, 2, 52)])
def test_R16_the_schedule_counts_optimizer_steps_and_the_last_window_is_applied(
    num_packs, epochs, expected, monkeypatch
):
    """100 batches, accumulation 4, 2 epochs: 50 steps; of 102 batches the last 2 are a step of their own."""
    import peagle.train.loop as loop

    seen: list[int] = []
    real = loop.train_step

    def counted(*arguments, **named):
        seen.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(loop, "train_step", counted)
    made = [row(f"r{i}", 9, 2, i) for i in range(num_packs)]
    settings = config(total_seq_len=10, epochs=epochs, gradient_accumulation_steps=4, scheduler_warmup_steps=0, lr=1e-3)
    _, result = run(settings, made)
    assert len(result.steps) == expected
    assert len(seen) == num_packs * epochs
    assert result.steps[0].lr == pytest.approx(1e-3)
    assert result.steps[-1].lr == pytest.approx(1e-3 / expected)  # one step above the floor, which the end reaches


def test_max_steps_ends_the_run_and_the_schedule():
    _, result = run(config(max_steps=5, epochs=50, scheduler_warmup_steps=0), rows(6))
    assert len(result.steps) == 5
    assert result.steps[-1].lr == pytest.approx(result.steps[0].lr / 5)


def test_an_unset_rate_is_settled_by_fit():
    _, result = run(config(lr=None, max_steps=1, scheduler_warmup_steps=0), rows(6))
    assert result.steps[0].lr == pytest.approx(0.384 / HIDDEN)


def test_scheduler_total_steps_wins():
    _, result = run(config(max_steps=3, scheduler_total_steps=1000, scheduler_warmup_ratio=0.01), rows(6))
    assert [step.lr for step in result.steps] == pytest.approx([3e-4, 6e-4, 9e-4])


def test_R17_the_best_is_the_first_of_the_highest_scores_and_a_fall_is_reported():
    best = Best()
    found = [
        best.update(score, loss, str(i))
        for i, (score, loss) in enumerate(zip((3.28, 3.34, 3.34, 3.24, 3.18), (2.0, 1.9, 1.8, 1.7, 1.6)))
    ]
    assert [is_best for is_best, _ in found] == [True, True, False, False, False]
    assert (best.name, best.score) == ("1", 3.34)
    assert found[2][1] is None
    assert "fell to 3.240 while the loss still improves" in found[3][1]


def test_K06_a_score_that_is_no_number_is_never_the_best():
    best = Best()
    assert best.update(float("nan"), 1.0, "0") == (
        False,
        "checkpoint 0: no score (nan); it cannot become checkpoint_best",
    )
    assert best.update(2.0, 1.0, "1")[0]
    assert best.scores == [None, 2.0]


def test_the_acceptance_length_is_joint_not_a_product_of_marginals():
    """Of 4 chains, depth 0 is right in 1 and 2, depth 1 in 3 and 4: marginals promise 0.25, not one chain has both."""
    assert Sums([0.0, 0.0], [2, 2], [4, 4], [2, 0]).acceptance_length == pytest.approx(1.5)
    assert Sums([0.0, 0.0], [2, 1], [4, 2], [2, 1]).acceptance_length == pytest.approx(1 + 0.5 + 0.5)


def test_states_that_are_not_finite_are_refused_with_the_row_s_name():
    made = rows(3)
    broken = made[1].aux_states.clone()
    broken[2, 5] = float("nan")
    made[1] = dataclasses.replace(made[1], aux_states=broken)
    with pytest.raises(StoreError, match="row row-0-1: aux_states hold NaN"):
        run(config(), made)


def test_states_of_another_mask_are_refused():
    made = rows(2)
    made[0] = dataclasses.replace(made[0], label_pos=made[0].label_pos[1:], last_states=made[0].last_states[1:])
    with pytest.raises(StoreError, match="target states are not those"):
        run(config(), made)


def test_a_row_longer_than_a_pack_is_refused():
    with pytest.raises(DataError, match="--total-seq-len is 48"):
        run(config(), [row("long", 60, 2, 1)])


def test_a_replay_tail_and_a_closing_user_turn_change_nothing():
    made = row("a", 30, 4, 1)
    padded_row = dataclasses.replace(
        made.row,
        input_ids=[*made.row.input_ids, 5, 6, 7],
        loss_mask=[*made.row.loss_mask, 0, 0, 0],
        next_is_supervised=False,
        tail_length=3,
    )
    inside = made.label_pos[made.label_pos < 29]  # with nothing supervised after it, y_29 has no label
    tail = torch.cat([inside, torch.tensor([29, 30, 31, 32])])
    padded = dataclasses.replace(
        made,
        row=padded_row,
        aux_states=torch.cat([made.aux_states, made.aux_states[:3]]),
        label_pos=tail,
        last_states=torch.cat([made.last_states[: inside.numel()], made.last_states[:4]]),
    )
    plain = dataclasses.replace(
        made,
        row=dataclasses.replace(made.row, next_is_supervised=False),
        label_pos=inside,
        last_states=made.last_states[: inside.numel()],
    )
    assert_same(run(config(), [padded])[0], run(config(), [plain])[0])


def test_gradients_that_are_not_finite_are_thrown_away_and_three_in_a_row_stop_the_run(monkeypatch, caplog):
    import peagle.train.loop as loop

    real, calls = loop.train_step, []

    def spoilt(model, *arguments):
        calls.append(1)
        result = real(model, *arguments)
        if len(calls) in bad:
            model.fc.weight.grad[0, 0] = float("nan")
        return result

    monkeypatch.setattr(loop, "train_step", spoilt)
    logging.getLogger("peagle").propagate = True
    bad = {2}
    model, result = run(config(total_seq_len=48), rows(12))
    assert result.progress.num_not_finite == 1
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values() if tensor.is_floating_point())
    assert "not finite, thrown away" in caplog.text
    calls.clear()
    bad = {2, 3, 4}
    model = drafter()
    with pytest.raises(TrainingError, match="not finite 3 times in a row"):
        run(config(total_seq_len=48), rows(12), model=model)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values() if tensor.is_floating_point())


def test_clipping_bounds_the_step_and_zero_does_not_clip():
    settings = {"optimizer": "adamw", "max_steps": 1, "scheduler_warmup_steps": 0}
    clipped = run(config(max_grad_norm=1e-12, **settings), rows(4))[0]
    free = run(config(max_grad_norm=0.0, **settings), rows(4))[0]
    start = drafter().double()
    # A gradient far below Adam's epsilon hardly moves a weight, one far above moves it by the learning rate.
    assert (clipped.fc.weight - start.fc.weight).abs().max() < 1e-3 * (free.fc.weight - start.fc.weight).abs().max()


@pytest.mark.parametrize("what", ["mask-token", "none"])
def test_embedding_rows_that_are_not_trained_stay_the_verifier_s(what):
    model, _ = run(config(train_embeddings=what), rows(6))
    moved = (model.embed_tokens.weight != drafter().double().embed_tokens.weight).any(1).nonzero().flatten().tolist()
    assert moved == ([31] if what == "mask-token" else [])
    assert torch.equal(model.lm_head.weight, drafter().double().lm_head.weight)


def test_a_trained_head_moves():
    model, _ = run(config(train_lm_head=True), rows(6))
    assert not torch.equal(model.lm_head.weight, drafter().double().lm_head.weight)


@pytest.mark.parametrize("loss", ["kl_div", "ce", "tv"])
def test_every_loss_learns_with_a_pruned_vocabulary(loss):
    ids = list(range(0, 30, 2))
    settings = config(loss_fn=loss, epochs=5)
    _, result = run(settings, rows(20), rows(4, seed=1), model=drafter(draft_ids=ids))
    assert result.steps[-1].loss < 0.8 * result.steps[0].loss
    # Half of the verifier's choices cannot be drafted, and they count as missed.
    assert max(result.validations[-1].accuracy) < 0.75


def test_depth_weights_change_what_is_learned():
    plain, _ = run(config(), rows(6))
    decayed, _ = run(config(depth_loss_decay=0.5), rows(6))
    assert not torch.equal(plain.fc.weight, decayed.fc.weight)


@pytest.mark.parametrize(
    ("freq", "expected"), [(1.0, [4, 8]), (2.0, [8]), (0.5, [2, 4, 6, 8]), (0.3, [2, 3, 4, 6, 7, 8])]
)
def test_checkpoint_freq_counts_epochs(freq, expected):
    made = [row(f"r{i}", 30, 2, i) for i in range(4)]
    _, result = run(config(total_seq_len=32, epochs=2, checkpoint_freq=freq), made, rows(2, seed=1))
    assert [found.step for found in result.validations] == expected


def test_validation_uses_all_depths_of_all_anchors_and_draws_nothing():
    settings = config(down_sample_ratio=0.3, down_sample_ratio_min=0.0, epochs=1)
    held_out = rows(4, seed=1)
    found = [run(settings.model_copy(update={"seed": s}), rows(4), held_out)[1].validations[0] for s in (1, 2)]
    supervised = sum(sum(max(0, len(r.label_pos) - depth) for depth in range(settings.num_depths)) for r in held_out)
    assert [f.num_supervised for f in found] == [supervised, supervised]


def test_metrics_past_a_resumed_step_are_dropped_and_a_cut_line_too(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, None)
    log.begin(0)
    for step in range(1, 6):
        metrics = StepMetrics(
            step=step,
            epoch=0,
            loss=1.0,
            accuracy=[0.5],
            lr=1e-3,
            grad_norm=float("inf"),
            num_supervised=3,
            num_tokens=4,
            seconds=0.1,
            data_wait_s=0.0,
        )
        log.write("train", metrics)
    with open(path, "a") as handle:
        handle.write('{"kind": "tra')
    MetricsLog(path, None).begin(3)
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert '"grad_norm": null' in lines[0]
