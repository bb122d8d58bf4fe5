from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.cli.main import main
from peagle.data.draft_vocab import DraftVocab, build_vocab
from peagle.drafter import checkpoint as drafter_checkpoint
from peagle.drafter.model_config import DrafterConfig, config_for
from peagle.drafter.network import Drafter
from peagle.errors import CheckpointError
from peagle.serve.check import check_checkpoint
from peagle.serve.config import CheckConfig
from peagle.serve.files import Findings
from peagle.verifier.model_config import load_verifier_config
from peagle.verifier.weights import load_embedding, load_head
from peagle.vllm.launch import InstalledVllm
from tests.fakes import edit_config, tiny_verifier

VLLM = InstalledVllm("0.32.0", "", None)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_verifier(tmp_path_factory.mktemp("verifier"), "qwen3", dtype="bfloat16")


def drafter_of(verifier: Path, **changes: Any) -> Drafter:
    verifier_config = load_verifier_config(str(verifier), False)
    settings: dict[str, Any] = {
        "speculators_model_type": "peagle",
        "layer_type": None,
        "num_layers": 2,
        "intermediate_size": None,
        "num_speculative_tokens": 4,
        "aux_layer_ids": (2, 4, 5),
        "draft_vocab_size": None,
        "mask_token_id": 270,
        "norm_before_residual": False,
        "norm_before_fc": True,
        "norm_output": False,
    }
    config: DrafterConfig = config_for(verifier_config, **(settings | changes))
    torch.manual_seed(0)
    drafter = Drafter(config)
    state = drafter.state_dict()
    with torch.no_grad():
        for tensor in state.values():
            if tensor.is_floating_point() and not bool(tensor.any()):
                tensor.normal_()
        state["embed_tokens.weight"].copy_(load_embedding(verifier_config))
        if not config.is_pruned:
            state["lm_head.weight"].copy_(load_head(verifier_config).weight)
    return drafter


@pytest.fixture
def folder(verifier: Path, tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    drafter_checkpoint.save(drafter_of(verifier), path, "bfloat16")
    return path


@pytest.fixture
def pruned(verifier: Path, tmp_path: Path) -> Path:
    path = tmp_path / "pruned"
    vocab = build_vocab(torch.arange(272), 64, [2], 272)
    drafter = drafter_of(verifier, draft_vocab_size=64)
    restrict(drafter, vocab, verifier)
    drafter_checkpoint.save(drafter, path, "bfloat16")
    return path


def restrict(drafter: Drafter, vocab: DraftVocab, verifier: Path) -> None:
    """Give a drafter the tables and the head of a pruned vocabulary."""
    state, head = drafter.state_dict(), load_head(load_verifier_config(str(verifier), False))
    state["d2t"].copy_(vocab.d2t)
    state["t2d"].copy_(vocab.t2d)
    state["lm_head.weight"].copy_(head.restricted(vocab.ids).weight)


def checked(path: Path, engine: InstalledVllm | None = VLLM, length: int | None = None) -> Findings:
    return check_checkpoint(CheckConfig(checkpoint=str(path), max_model_len=length), engine)


def edit_tensors(path: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def errors(path: Path, **kwargs: Any) -> str:
    return "\n".join(map(str, checked(path, **kwargs).of("error")))


def warnings(path: Path, **kwargs: Any) -> str:
    found = checked(path, **kwargs)
    assert found.is_servable, found
    return "\n".join(map(str, found.of("warning")))


def test_what_train_saves_passes_without_a_word(folder: Path, pruned: Path) -> None:
    for path in (folder, pruned):
        found = checked(path)
        assert found.of("error") == []
        assert found.of("warning") == []
    assert "embed_tokens.weight: is the verifier's" in "\n".join(map(str, checked(folder).of("note")))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["peagle", "eagle3"])
def test_both_layer_types_and_both_methods_pass(verifier: Path, tmp_path: Path, kind: str, method: str) -> None:
    mask = 270 if method == "peagle" else None
    drafter = drafter_of(
        verifier, layer_type=kind, speculators_model_type=method, mask_token_id=mask, norm_before_fc=method == "peagle"
    )
    drafter_checkpoint.save(drafter, tmp_path / "d", "bfloat16")
    assert checked(tmp_path / "d").of("error") == []


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_X01_another_number_of_aux_layers_needs_its_count_field(verifier: Path, tmp_path: Path, name: str) -> None:
    drafter = drafter_of(verifier, layer_type=name, aux_layer_ids=(1, 2, 4, 5))
    path = tmp_path / "four"
    drafter_checkpoint.save(drafter, path, "bfloat16")
    assert checked(path).of("error") == []
    edit_layers(path, num_aux_hidden_states=...)
    if name == "llama":
        assert "builds this drafter's input layer for 3 verifier layers, but 4 layer ids" in errors(path)
        assert "fc.weight: is [64, 256], the config makes it [64, 192]" in errors(path)
    else:
        assert errors(path) == ""
    edit_layers(path, num_aux_hidden_states=5)
    assert "num_aux_hidden_states is 5, but 4 layer ids are given" in errors(path)


def edit_layers(path: Path, **changes: Any) -> None:
    layers = json.loads((path / "config.json").read_text())["transformer_layer_config"]
    for key, value in changes.items():
        if value is ...:
            layers.pop(key, None)
        else:
            layers[key] = value
    edit_config(path, transformer_layer_config=layers)


def test_X02_a_random_embedding_is_noticed_and_a_trained_one_is_not(folder: Path) -> None:
    edit_tensors(folder, lambda t: t["embed_tokens.weight"].add_(0.001 * torch.randn_like(t["embed_tokens.weight"])))
    assert warnings(folder) == ""
    edit_tensors(folder, lambda t: t["embed_tokens.weight"].normal_())
    assert "has nothing in common with the verifier's" in warnings(folder)


@pytest.mark.parametrize(
    "name", ["fc.weight", "norm.weight", "layers.0.hidden_norm.weight", "layers.1.mlp.up_proj.weight", "mask_hidden"]
)
def test_X02_a_needed_tensor_that_is_missing_is_named(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    assert f"{name}: missing" in errors(folder)


def test_X04_a_drafter_brings_its_own_head_and_one_of_a_pruned_vocabulary_must(folder: Path, pruned: Path) -> None:
    for path in (folder, pruned):
        assert "lm_head.weight" in load_file(path / "model.safetensors")
    edit_tensors(pruned, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight: missing" in errors(pruned)


def test_an_empty_config_and_a_config_of_a_million_layers_are_errors(folder: Path) -> None:
    edit_layers(folder, num_hidden_layers=10**6)
    assert "num_hidden_layers is 1000000, over 256" in errors(folder)
    (folder / "config.json").write_text("{}")
    assert "is an empty object" in errors(folder)


def test_a_tensor_of_another_shape_or_name_is_an_error(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = torch.ones(65, dtype=torch.bfloat16)
        tensors["optimizer.step"] = torch.ones(1, dtype=torch.bfloat16)
        tensors["layers.0.mlp.gate_projection.weight"] = tensors.pop("layers.0.mlp.gate_proj.weight")

    edit_tensors(folder, edit)
    said = errors(folder)
    assert "norm.weight: is [65], the config makes it [64]" in said
    assert "optimizer.step: unknown tensor in model.safetensors" in said
    assert "layers.0.mlp.gate_proj.weight: missing" in said
    assert "is it layers.0.mlp.gate_projection.weight?" in said


def test_names_as_older_exports_write_them_are_read_as_vllm_does(folder: Path) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if name.startswith("layers.0."):
                tensors[name.replace("layers.0.", "midlayer.")] = tensors.pop(name)

    edit_tensors(folder, edit)
    assert errors(folder) == ""


@pytest.mark.parametrize(("value", "said"), [(float("nan"), "NaN"), (float("inf"), "infinity")])
def test_values_that_are_not_finite_are_an_error(folder: Path, value: float, said: str) -> None:
    edit_tensors(folder, lambda tensors: tensors["layers.1.mlp.down_proj.weight"][3].fill_(value))
    assert "layers.1.mlp.down_proj.weight: holds NaN or infinity" in errors(folder)


def test_X07_one_dtype_for_all_tensors_and_the_config(folder: Path, verifier: Path, tmp_path: Path) -> None:
    edit_config(folder, dtype="float32")
    assert "dtype is float32, the tensors are bfloat16" in errors(folder)
    edit_config(folder, dtype="bfloat16")
    edit_tensors(folder, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"].float()}))
    assert "fc.weight: tensors are of several dtypes (bfloat16, float32)" in errors(folder)
    drafter_checkpoint.save(drafter_of(verifier), tmp_path / "wide", "float32")
    assert "dtype is float32, the verifier's bfloat16; vLLM converts" in warnings(tmp_path / "wide")


REMOVED = [
    ("architectures", "architectures is None; expected ['PEagleDraftModel']"),
    ("speculators_model_type", "speculators_model_type is None"),
    ("draft_vocab_size", "draft_vocab_size is missing"),
    ("eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids is missing"),
    ("mask_token_id", "mask_token_id is None"),
    ("norm_before_residual", "norm_before_residual is not written; vLLM takes false"),
    ("target_hidden_size", "target_hidden_size is missing"),
    ("transformer_layer_config", "transformer_layer_config is missing"),
    ("speculators_config", "proposal_methods is missing"),
]
REMOVED_LAYERS = [
    ("model_type", "model_type is None; vLLM serves drafters with layers of type llama or qwen3 only"),
    ("vocab_size", "transformer_layer_config.vocab_size is missing"),
    ("head_dim", "transformer_layer_config.head_dim is missing"),
    ("hidden_size", "hidden_size is missing"),
    ("num_hidden_layers", "num_hidden_layers is missing"),
    ("num_key_value_heads", "num_key_value_heads is missing"),
    ("max_position_embeddings", "max_position_embeddings is missing"),
    ("rms_norm_eps", "rms_norm_eps is None"),
    ("rope_parameters", "rope_parameters is missing"),
]


@pytest.mark.parametrize(("name", "said"), REMOVED)
def test_X09_X15_each_field_that_vllm_reads_is_missed_by_name(folder: Path, name: str, said: str) -> None:
    edit_config(folder, **{name: ...})
    assert said in errors(folder)


@pytest.mark.parametrize(("name", "said"), REMOVED_LAYERS)
def test_X09_each_field_of_the_layer_config_is_missed_by_name(folder: Path, name: str, said: str) -> None:
    edit_layers(folder, **{name: ...})
    assert said in errors(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected ['PEagleDraftModel'] for peagle"),
        ({"speculators_model_type": "medusa"}, "expected peagle or eagle3"),
        ({"mask_token_id": 272}, "mask_token_id 272 has no row among 272 embeddings"),
        ({"mask_token_id": True}, "mask_token_id is True"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 2, 4]}, "sort, no doubles"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, "layer id 9 does not exist in the verifier, which has 8"),
        ({"draft_vocab_size": 300}, "draft_vocab_size 300 exceeds vocab_size 272"),
        ({"fc_norm": True}, "fc_norm is set, but vLLM does not read it for peagle"),
        ({"norm_output": True}, "norm_output is set, but vLLM does not read it for peagle"),
        ({"norm_before_residual": "no"}, "norm_before_residual is not written"),
        ({"target_hidden_size": 128}, "target_hidden_size is 128, the verifier's hidden_size is 64"),
    ],
)
def test_a_wrong_field_is_an_error(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    assert said in errors(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gemma3_text"}, "layers of type llama or qwen3 only"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}, "mrope_section"),
        ({"layer_types": ["full_attention"]}, "layer_types must name 2 layers"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types mixes"),
        ({"hidden_act": "gelu"}, "silu only"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"fc_norm": True}, "fc_norm is set"),
        ({"vocab_size": 0}, "vocab_size is 0; expected a whole number of at least 1"),
    ],
)
def test_a_wrong_field_of_the_layer_config_is_an_error(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_layers(folder, **changes)
    assert said in errors(folder)


@pytest.mark.parametrize("count", [0, -1, None, "4"])
def test_X05_the_number_of_drafted_tokens_must_be_there(folder: Path, count: Any) -> None:
    config = json.loads((folder / "config.json").read_text())["speculators_config"]
    config["proposal_methods"][0]["speculative_tokens"] = count
    edit_config(folder, speculators_config=config)
    assert "speculative_tokens is" in errors(folder)


def test_the_pruned_vocabulary_is_a_map_of_offsets(pruned: Path) -> None:
    edit_tensors(pruned, lambda tensors: tensors.pop("d2t"))
    assert "d2t: missing: the draft vocabulary has 64 of 272 tokens" in errors(pruned)


@pytest.mark.parametrize("fault", ["ids", "double", "t2d", "dtype"])
def test_a_wrong_map_is_noticed(pruned: Path, fault: str) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        if fault == "ids":
            tensors["d2t"] += torch.arange(64)  # ids where offsets belong
        elif fault == "double":
            tensors["d2t"][5] = tensors["d2t"][4] - 1
        elif fault == "t2d":
            tensors["t2d"] = ~tensors["t2d"]
        else:
            tensors["d2t"] = tensors["d2t"].float()

    edit_tensors(pruned, edit)
    said = {
        "ids": "d2t holds offsets, not ids",
        "double": "maps to",
        "t2d": "names other tokens than d2t",
        "dtype": "F32",
    }
    assert said[fault] in errors(pruned)


def test_a_vocabulary_without_an_end_token_is_a_warning(verifier: Path, tmp_path: Path) -> None:
    vocab = build_vocab(torch.arange(272), 64, [], 272)
    drafter = drafter_of(verifier, draft_vocab_size=64)
    restrict(drafter, vocab, verifier)
    drafter_checkpoint.save(drafter, tmp_path / "d", "bfloat16")
    assert "no end token ([2]) is in the draft vocabulary" in warnings(tmp_path / "d")


def test_X11_a_longer_server_is_a_warning(folder: Path) -> None:
    assert warnings(folder) == ""
    assert "max_position_embeddings is 512, the server's length 8192" in warnings(folder, length=8192)


@pytest.mark.parametrize(("version", "servable"), [("0.27.1", False), ("0.28.0", True), ("0.32.0+cpu", True)])
def test_X12_an_older_vllm_is_refused_with_the_version_needed(folder: Path, version: str, servable: bool) -> None:
    found = checked(folder, engine=InstalledVllm(version, "", None))
    assert found.is_servable is servable
    if not servable:
        assert "0.28 or newer" in str(found.of("error")[0])


def test_wrong_sampling_of_the_cpu_build_is_a_warning(folder: Path) -> None:
    assert "sample wrongly with a drafter" in warnings(folder, engine=InstalledVllm("0.32.0+cpu", "", None))
    assert warnings(folder, engine=InstalledVllm("0.32.0+cu130", "", None)) == ""


def test_X14_an_option_below_its_engine_version_is_a_warning(verifier: Path, tmp_path: Path) -> None:
    drafter = drafter_of(verifier, speculators_model_type="eagle3", mask_token_id=None, norm_before_fc=True)
    drafter_checkpoint.save(drafter, tmp_path / "d", "bfloat16")
    assert "may ignore norm_before_fc" in warnings(tmp_path / "d", engine=InstalledVllm("0.20.0", "", None))
    assert warnings(tmp_path / "d") == ""


def test_X16_a_sliding_window_in_the_drafter_is_reported(folder: Path) -> None:
    edit_layers(folder, layer_types=["sliding_attention"] * 2, sliding_window=32)
    assert "sliding_window is 32" in warnings(folder)


def test_F15_a_family_that_the_engine_lacks_is_said_before_serving(folder: Path, tmp_path: Path) -> None:
    models = tmp_path / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models / "registry.py").write_text('_MODELS = {"Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM")}\n')
    (models / "qwen3.py").write_text("class Qwen3ForCausalLM: ...\n")
    said = warnings(folder, engine=InstalledVllm("0.32.0", "", tmp_path / "vllm"))
    assert "0.32.0 has no EAGLE-3 support in its own Qwen3ForCausalLM" in said


def test_a_verifier_out_of_reach_or_of_another_kind_is_an_error(folder: Path, tmp_path: Path) -> None:
    found = check_checkpoint(CheckConfig(checkpoint=str(folder), verifier_name_or_path=str(tmp_path / "nowhere")), VLLM)
    assert "cannot be reached" in str(found.of("error")[0])
    other = tiny_verifier(tmp_path / "other", "llama", hidden_size=32, num_attention_heads=2)
    found = check_checkpoint(CheckConfig(checkpoint=str(folder), verifier_name_or_path=str(other)), VLLM)
    said = "\n".join(map(str, found.found))
    assert "is a LlamaForCausalLM; the drafter was made for a Qwen3ForCausalLM" in said
    assert "hidden_size is 64, the verifier's hidden_size is 32" in said
    assert check_checkpoint(CheckConfig(checkpoint=str(folder), verifier_check=False), VLLM).is_servable


def test_files_that_are_damaged_doubled_or_absent_are_named(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    save_file({"norm.weight": torch.ones(64, dtype=torch.bfloat16)}, folder / "old.safetensors")
    assert "norm.weight is in model.safetensors too" in errors(folder)
    (folder / "old.safetensors").unlink()
    (folder / "training_state").mkdir()
    (folder / "training_state" / "optimizer.safetensors").write_bytes(b"anything")
    assert errors(folder) == ""
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.safetensors: damaged or cut short" in errors(folder)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").touch()
    assert "no .safetensors file at the checkpoint's root; pytorch_model.bin is not read" in errors(folder)
    (folder / "config.json").write_text("{")
    assert "cannot be read as JSON" in errors(folder)


def test_the_command_says_what_it_found_and_exits_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(folder), "--vllm-version", "0.32.0"]) == 0
    assert "can be served (0 errors, 0 warnings)" in capsys.readouterr().out
    edit_config(folder, mask_token_id=...)
    assert main(["check", str(folder), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["servable"] is False
    assert any("mask_token_id" in finding["message"] for finding in printed["findings"])
    assert main(["check", str(folder / "nowhere")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("name", ["lm_head.weight", "fc.weight", "norm.weight", "layers.1.mlp.up_proj.weight"])
def test_X03_a_tensor_that_load_refuses_to_miss_is_an_error_by_name(folder: Path, name: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(name))
    assert f"{name}: missing" in errors(folder)
    with pytest.raises(CheckpointError, match=name):
        drafter_checkpoint.load(str(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", ["lm_head.weight", "t2d", "d2t"])
def test_X03_of_a_pruned_vocabulary_too(pruned: Path, name: str) -> None:
    edit_tensors(pruned, lambda tensors: tensors.pop(name))
    assert f"{name}: missing" in errors(pruned)
    with pytest.raises(CheckpointError, match=name):
        drafter_checkpoint.load(str(pruned), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["folder", "pruned"])
def test_X06_a_head_that_is_not_the_verifiers_is_named(request: pytest.FixtureRequest, kind: str) -> None:
    path: Path = request.getfixturevalue(kind)
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].normal_())
    assert "lm_head.weight: is not the verifier's (median cosine" in warnings(path)
    # Trained by a run that says so.
    (path / "run.yaml").write_text("train:\n  train_lm_head: true\n")
    assert errors(path) == ""
    assert "lm_head.weight: was trained" in "\n".join(map(str, checked(path).of("note")))
    # The run says that it did not, and the head is a little off.
    edit_tensors(path, lambda tensors: tensors["lm_head.weight"].copy_(tensors["lm_head.weight"].roll(1, 0)))
    (path / "run.yaml").write_text("train:\n  train_lm_head: false\n")
    assert "its run did not train it" in errors(path)


def test_X06_one_row_that_was_changed_is_enough(folder: Path) -> None:
    (folder / "run.yaml").write_text("train:\n  train_lm_head: false\n")
    assert errors(folder) == ""
    edit_tensors(folder, lambda tensors: tensors["lm_head.weight"][7].neg_())
    assert "lm_head.weight: is not the verifier's" in errors(folder)


def loads(path: Path) -> bool:
    try:
        drafter_checkpoint.load(str(path), torch.float32, torch.device("cpu"))
    except CheckpointError:
        return False
    return True


def test_V06_check_and_load_have_one_rule_for_the_tables(folder: Path, pruned: Path) -> None:
    def whole(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"] = torch.zeros(272, dtype=torch.int64)
        tensors["t2d"] = torch.ones(272, dtype=torch.bool)

    edit_tensors(folder, whole)
    assert checked(folder).is_servable
    assert loads(folder)
    edit_tensors(folder, lambda tensors: tensors["d2t"].add_(1))
    assert not checked(folder).is_servable
    assert not loads(folder)
    edit_tensors(pruned, lambda tensors: tensors["d2t"].zero_())
    assert "t2d: names other tokens than d2t" in errors(pruned)
    assert not loads(pruned)


@pytest.mark.parametrize("projection", ["self_attn.v_proj", "mlp.up_proj"])
def test_X08_what_only_float16_cannot_hold_is_warned_of(folder: Path, projection: str) -> None:
    """The same function in bfloat16: one factor goes into a matrix, out of the next."""
    after = {"self_attn.v_proj": "self_attn.o_proj", "mlp.up_proj": "mlp.down_proj"}[projection]

    def scale(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"layers.0.{projection}.weight"] *= 2.0**18
        tensors[f"layers.0.{after}.weight"] *= 2.0**-18

    assert "float16" not in warnings(folder)
    edit_tensors(folder, scale)
    assert f"layers.0.{projection}.weight: its outputs reach about" in warnings(folder)
