"""Claims about `peagle convert`: the same drafts, exact ways back, and errors that name what cannot be carried."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle.cli.main import main
from peagle.convert.config import ConvertConfig
from peagle.convert.convert import convert
from peagle.convert.tensors import draft_ids_of
from peagle.drafter.checkpoint import load
from peagle.engine import Sampling
from peagle.engine.drafting import Drafting, FusedDrafter
from peagle.errors import CheckpointError, ConfigError
from peagle.serve.check import check_checkpoint
from peagle.serve.config import CheckConfig
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_embedding, load_head
from tests.drafter.flat_forward import DIM, HEADS, HIDDEN, KV, PRUNED, VOCAB, Witness, base_tensors, flat_config
from tests.fakes import tiny_verifier

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> str:
    return str(tiny_verifier(tmp_path_factory.mktemp("v") / "verifier"))


@dataclass
class Source:
    """A checkpoint in its project's layout, and the plain tensors behind it."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    plain: dict[str, Tensor]
    witness: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file({name: t.contiguous() for name, t in self.tensors.items()}, folder / "model.safetensors")
        return folder


def renamed(plain: dict[str, Tensor], first_layer: str = "layers.0.", prefix: str = "", without: tuple[str, ...] = ()):
    at_the_top = ("lm_head.weight", "mask_hidden", "d2t", "t2d")
    return {
        name if name in at_the_top else prefix + name.replace("layers.0.", first_layer): tensor
        for name, tensor in plain.items()
        if name not in without
    }


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    made = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            made[name.replace("q_proj", "qkv_proj")] = torch.cat(
                [made.pop(name.replace("q_proj", p)) for p in ("q_proj", "k_proj", "v_proj")]
            )
        elif ".gate_proj." in name:
            made[name.replace("gate_proj", "gate_up_proj")] = torch.cat(
                [made.pop(name.replace("gate_proj", p)) for p in ("gate_proj", "up_proj")]
            )
    return made


def source(layout: str, verifier: str) -> Source:
    """One checkpoint of each layout."""
    plain_of = {"bias": False, "qk_norm": False, "norm_before_fc": False}
    tables = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB, dtype=torch.bool)}
    if layout == "safeailab":  # one midlayer, no embedding: the verifier's
        plain = base_tensors(1, pruned=True, parallel=False, seed=1, **plain_of)
        plain["embed_tokens.weight"] = load_embedding(load_verifier_config(verifier, False)).float()
        return Source(flat_config(1, pruned=True), renamed(plain, "midlayer.", without=("embed_tokens.weight",)), plain)
    if layout == "specforge":  # EAGLE-3.1's carried state, layer ids as outputs, a whole vocabulary with its tables
        plain = base_tensors(1, pruned=False, parallel=False, seed=2, **plain_of)
        eagle = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
        config = flat_config(1, pruned=False, norm_output=True, target_model_type="qwen3", **eagle)
        return Source(config, renamed(plain | tables, "midlayer."), plain, {"norm_output": True})
    if layout == "specforge p-eagle":
        plain = base_tensors(3, pruned=False, parallel=True, seed=3, **plain_of)
        config = flat_config(3, pruned=False) | {"architectures": ["PEagleDraftModel"]}
        return Source(config, plain | tables, plain, {"mask_token": 270}, {"mask_token_id": 270})
    if layout == "aws":  # biases, ptd_token_id (once a string), fused projections
        plain = base_tensors(4, pruned=False, parallel=True, seed=4, **{**plain_of, "bias": True})
        config = flat_config(4, pruned=False, ptd_token_id="269", attention_bias=True)
        return Source(config, fused(plain), plain, {"mask_token": 269})
    if layout == "nvidia":  # `model.` before everything, mask_hidden of two dimensions, absolute d2t as int32
        plain = base_tensors(2, pruned=True, parallel=True, seed=5, **{**plain_of, "norm_before_fc": True})
        more = {"parallel_drafting": True, "mask_token_id": 268, "num_depths": 7, "norm_before_fc": True}
        config = flat_config(2, pruned=True, **more) | {"architectures": ["LlamaEagle3DraftModel"]}
        tensors = renamed(plain, prefix="model.")
        tensors["mask_hidden"] = tensors["mask_hidden"].view(1, -1)
        tensors["d2t"] = (plain["d2t"] + torch.arange(PRUNED)).to(torch.int32)
        return Source(config, tensors, plain, {"mask_token": 268})
    if layout == "nvidia eagle-3":  # neither embedding, head nor t2d
        plain = base_tensors(1, pruned=True, parallel=False, seed=6, **plain_of)
        verifier_config = load_verifier_config(verifier, False)
        plain["embed_tokens.weight"] = load_embedding(verifier_config).float()
        plain["lm_head.weight"] = (
            load_head(verifier_config).restricted(plain["d2t"] + torch.arange(PRUNED)).weight.float()
        )
        eagle = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True}
        config = flat_config(1, pruned=True, eagle_config=eagle, norm_before_residual=True)
        left = ("embed_tokens.weight", "lm_head.weight", "t2d")
        return Source(config, renamed(plain, without=left), plain, {"norm_before_residual": True})
    assert layout == "speculators"  # an older config: no layer ids, rope in the old place, norm_before_residual unsaid
    plain = base_tensors(2, pruned=True, parallel=False, seed=7, **{**plain_of, "qk_norm": True})
    layers = flat_config(2, pruned=True) | {"model_type": "qwen3"}
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": PRUNED,
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
            "verifier": {"name_or_path": verifier, "architectures": ["Qwen3ForCausalLM"]},
        },
        "target_hidden_size": None,
        "transformer_layer_config": layers,
    }
    return Source(config, plain, plain, {"norm_before_residual": True})


LAYOUTS = ["safeailab", "specforge", "specforge p-eagle", "aws", "nvidia", "nvidia eagle-3", "speculators"]


def settings(source: Path, output: Path, verifier: str, **values: Any) -> ConvertConfig:
    plain = {"source": str(source), "output": output, "verifier_name_or_path": verifier}
    return ConvertConfig.build({**plain, **values})


def engine_draft(folder: Path, pair_ids: list[int], aux: Tensor, depth: int) -> list[int]:
    drafter = load(str(folder), torch.float32, CPU)
    with torch.inference_mode():
        drafting = Drafting(
            layers=FusedDrafter(drafter),
            num_speculative_tokens=depth,
            sampling=Sampling(),
            vocab_size=VOCAB,
            num_rows=1,
            capacity=64,
        )
        return drafting.propose(0, torch.tensor([pair_ids]), aux[None], [0], [len(pair_ids)], None).ids[0].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_checkpoint_drafts_what_its_source_did(layout, verifier, tmp_path):
    made = source(layout, verifier)
    convert(settings(made.write(tmp_path / "source"), tmp_path / "ours", verifier, **made.settings))
    witness = Witness(made.plain, **made.witness)
    generator = torch.Generator().manual_seed(11)
    for trial in range(6):
        length = 3 + 4 * trial
        pair_ids = torch.randint(0, VOCAB, (length,), generator=generator).tolist()
        aux = torch.randn(length, 3 * HIDDEN, generator=generator)
        expected = witness.draft(pair_ids, aux, 5)
        assert engine_draft(tmp_path / "ours", pair_ids, aux, 5) == expected
    assert len(set(expected)) > 1
    found = check_checkpoint(CheckConfig(checkpoint=str(tmp_path / "ours")), None)
    assert found.of("error") == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_exact(layout, verifier, tmp_path):
    made = source(layout, verifier)
    folder = made.write(tmp_path / "source")
    convert(settings(folder, tmp_path / "ours", verifier, **made.settings))
    convert(settings(tmp_path / "ours", tmp_path / "back", verifier, to=layout.split(" ")[0]))
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == made.config
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == made.tensors.keys()
    for name, tensor in made.tensors.items():
        assert back[name].dtype == tensor.dtype, name
        assert torch.equal(back[name], tensor), name


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        ("eagle3", "safeailab"),
        *((kind, to) for kind in ("eagle3", "peagle") for to in ("specforge", "aws", "nvidia", "speculators")),
    ],
)
def test_ours_to_another_layout_and_back_is_exact(kind, to, verifier, tmp_path):
    made = source("safeailab" if kind == "eagle3" else "specforge p-eagle", verifier)
    convert(settings(made.write(tmp_path / "source"), tmp_path / "first", verifier, **made.settings))
    convert(settings(tmp_path / "first", tmp_path / "ours", verifier, to="speculators"))  # no record of the source
    assert "converted_from" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    convert(settings(tmp_path / "ours", tmp_path / "there", verifier, to=to))
    convert(ConvertConfig.build({"source": str(tmp_path / "there"), "output": tmp_path / "back"}))
    first, back = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "back"))
    back.pop("converted_from", None)
    assert back == first
    ours, again = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "back"))
    assert ours.keys() == again.keys()
    for name, tensor in ours.items():
        assert torch.equal(again[name], tensor), name


def test_an_old_pickled_checkpoint_is_read(verifier, tmp_path):
    made = source("safeailab", verifier)
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(made.config))
    torch.save(made.tensors, folder / "pytorch_model.bin")
    convert(settings(folder, tmp_path / "ours", verifier))
    assert load(str(tmp_path / "ours"), torch.float32, CPU).config.num_layers == 1


def refusal(made: Source, verifier: str | None, tmp_path: Path, **values: Any) -> str:
    named = {} if verifier is None else {"verifier_name_or_path": verifier}
    given = {"source": str(made.write(tmp_path / "source")), "output": tmp_path / "out", **named, **values}
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        convert(ConvertConfig.build({**made.settings, **given}))
    assert not (tmp_path / "out").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "tensors", "message"),
    [
        ({"fc_norm": True}, {}, "fc_norm cannot be carried"),
        ({"mlp_bias": True}, {}, "mlp_bias cannot be carried"),
        ({"hidden_act": "gelu"}, {}, "hidden_act gelu cannot be carried"),
        ({"quantization_config": {}}, {}, "quantised tensors cannot be carried"),
        ({"layer_types": ["sliding_attention"]}, {}, "sliding window attention cannot be carried"),
        ({}, {"parallel_draft_heads.0.medusa_layers.0.linear.weight": torch.ones(2, 2)}, "Medusa heads"),
        ({}, {"midlayer.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}, "multi-head latent attention"),
        ({}, {"something.weight": torch.ones(2)}, "tensor something.weight cannot be carried"),
        ({}, {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(2)}, "read by no engine; .*--drop-unused"),
        ({"target_hidden_size": 128}, {}, "its width is 64, the verifier's 128"),
        ({"vocab_size": 300}, {}, "made for a vocabulary of 300"),
        ({"draft_vocab_size": 80}, {}, "d2t has 90 entries for 80 draft tokens"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, "rope_type 'dynamic' is not one of"),
        ({"intermediate_size": None}, {}, "config.json has no intermediate_size"),
        ({"intermediate_size": 50}, {}, r"mlp.gate_proj.weight is \[48, 64\], its config.json asks for \[50, 64\]"),
    ],
)
def test_what_cannot_be_carried_is_named(changes, tensors, message, verifier, tmp_path):
    import re

    made = source("safeailab", verifier)
    made.config = {**made.config, **changes}
    made.tensors = {**made.tensors, **tensors}
    assert re.search(message, refusal(made, verifier, tmp_path))


def test_what_the_source_does_not_say_is_asked_for_by_its_flag(verifier, tmp_path):
    assert "--verifier-name-or-path" in refusal(source("safeailab", verifier), None, tmp_path / "a")
    peagle = source("specforge p-eagle", verifier)
    peagle.settings = {}
    assert "--mask-token-id" in refusal(peagle, verifier, tmp_path / "b")
    mixed = source("safeailab", verifier)
    mixed.tensors["norm.weight"] = mixed.tensors["norm.weight"].bfloat16()
    assert "types bfloat16, float32; choose one with --dtype" in refusal(mixed, verifier, tmp_path / "c")
    deep = source("safeailab", verifier)
    deep.tensors["fc.weight"] = torch.ones(HIDDEN, 4 * HIDDEN)
    assert "fc reads 4 layers, the layer ids are [2, 4, 5]" in refusal(deep, verifier, tmp_path / "d")
    missing = source("safeailab", verifier)
    del missing.tensors["norm.weight"]
    assert "no tensor norm.weight" in refusal(missing, verifier, tmp_path / "e")
    plain = source("safeailab", verifier)
    del plain.tensors["fc.weight"]
    assert "not an EAGLE-3 or P-EAGLE drafter" in refusal(plain, verifier, tmp_path / "f")


def test_the_command_converts_and_says_so_or_says_why_not_in_one_line(verifier, tmp_path, capsys):
    made = source("safeailab", verifier)
    folder = made.write(tmp_path / "source")
    assert main(["convert", str(folder), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    command = ["convert", str(folder), "--output", str(tmp_path / "out"), "--verifier-name-or-path", verifier]
    assert main(command) == 0
    said = capsys.readouterr().err
    assert "no tensor embed_tokens.weight in the source: the verifier's" in said
    assert "read 15 tensors (safeailab), wrote 16 (peagle)" in said


def test_an_existing_output_is_never_overwritten(verifier, tmp_path):
    made = source("safeailab", verifier)
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match="is there already"):
        convert(settings(made.write(tmp_path / "source"), tmp_path / "out", verifier))


def test_what_another_layout_has_no_place_for_is_named(verifier, tmp_path):
    for layout, to, message in (
        ("specforge p-eagle", "safeailab", "mask_hidden"),
        ("speculators", "safeailab", "2 layers (at most 1); norms of queries and keys"),
        ("aws", "specforge", "attention biases"),
        ("nvidia", "specforge", "norm_before_fc"),
        ("specforge", "safeailab", "norm_output"),
    ):
        made = source(layout, verifier)
        where = tmp_path / f"{layout} {to}"
        convert(settings(made.write(where / "source"), where / "ours", verifier, **made.settings))
        with pytest.raises(CheckpointError) as caught:
            convert(settings(where / "ours", where / "out", verifier, to=to))
        assert f"cannot be carried to {to}: " in str(caught.value)
        assert message in str(caught.value)
        assert not (where / "out").exists()


def test_a_trained_embedding_is_not_silently_left_to_the_verifier(verifier, tmp_path):
    made = source("safeailab", verifier)
    convert(settings(made.write(tmp_path / "source"), tmp_path / "ours", verifier))
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors["embed_tokens.weight"][5] += 1
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight cannot be carried: .* it has changed since"):
        convert(settings(tmp_path / "ours", tmp_path / "back", verifier, to="safeailab"))
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight, which differs from the verifier's"):
        convert(settings(tmp_path / "ours", tmp_path / "other", verifier, to="specforge"))


def test_V05_d2t_is_read_as_offsets_or_as_ids_by_what_t2d_says():
    ids, vocab = torch.tensor([2, 5, 9]), 12
    offsets = ids - torch.arange(3)
    assert offsets.tolist() == [2, 4, 7]
    flags = torch.zeros(vocab, dtype=torch.bool)
    flags[ids] = True
    for table, form in ((offsets, "offsets"), (ids, "absolute")):
        found, said = draft_ids_of(table, flags, "auto", vocab, "here")
        assert (found.tolist(), said) == ([2, 5, 9], form)
    assert draft_ids_of(offsets, None, "auto", vocab, "here")[1] == "offsets"
    assert draft_ids_of(ids, None, "absolute", vocab, "here")[0].tolist() == [2, 5, 9]
    assert draft_ids_of(torch.tensor([2, 5, 11]), None, "auto", vocab, "here")[1] == "absolute"  # 11 + 2 is too large
    assert draft_ids_of(torch.zeros(vocab, dtype=torch.int64), None, "auto", vocab, "here")[0].tolist() == list(
        range(12)
    )
    with pytest.raises(CheckpointError, match="no ascending ids below 12 that t2d agrees with"):
        draft_ids_of(torch.tensor([2, 4, 8]), flags, "auto", vocab, "here")
    with pytest.raises(CheckpointError, match="no ascending ids"):
        draft_ids_of(torch.tensor([5, 2, 9]), None, "absolute", vocab, "here")


def test_layer_ids_that_begin_with_one_are_outputs(verifier, tmp_path):
    made = source("specforge", verifier)
    folder = made.write(tmp_path / "source")
    for meaning, expected in (("auto", (2, 4, 5)), ("outputs", (2, 4, 5)), ("inputs", (1, 3, 4))):
        convert(settings(folder, tmp_path / meaning, verifier, layer_id_meaning=meaning))
        assert load(str(tmp_path / meaning), torch.float32, CPU).config.aux_layer_ids == expected
    convert(settings(folder, tmp_path / "asked", verifier, target_layer_ids=(3, 4, 6)))
    assert load(str(tmp_path / "asked"), torch.float32, CPU).config.aux_layer_ids == (3, 4, 6)


def test_unused_tensors_can_be_dropped_and_a_type_chosen(verifier, tmp_path):
    made = source("safeailab", verifier)
    made.tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(DIM // 2)
    folder = made.write(tmp_path / "source")
    convert(settings(folder, tmp_path / "ours", verifier, drop_unused=True, dtype="bfloat16"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}


def test_fused_projections_of_another_size_are_refused(verifier, tmp_path):
    made = source("aws", verifier)
    name = "layers.1.self_attn.qkv_proj.weight"
    made.tensors[name] = made.tensors[name][1:]
    assert f"{name} has {(HEADS + 2 * KV) * DIM - 1} rows" in refusal(made, verifier, tmp_path)
