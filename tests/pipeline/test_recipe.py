"""A recipe is one file; what follows from it is filled in, and what does not fit is refused by name."""

from __future__ import annotations

import pytest

from peagle import embedded
from peagle.errors import ConfigError
from peagle.pipeline.plan import Fingerprints, decide
from peagle.pipeline.recipe import RECIPES, Recipe, find, read, server_config, stages

MINIMAL = """
name: tiny
verifier: embedded:verifier
output: runs/tiny
prepare: {data: [embedded:train], max_samples: 20}
extract: {}
train: {epochs: 1}
"""


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_paths_between_stages_follow_from_the_recipe(tmp_path):
    found = {s.name: s for s in stages(read(write(tmp_path, MINIMAL), tmp_path / "out", ()))}
    assert list(found) == ["prepare", "extract", "train"]
    assert found["extract"].settings["preprocessed_data"] == str(tmp_path / "out" / "prepared")
    assert found["train"].settings["hidden_states_path"] == str(found["extract"].output)
    assert str(found["prepare"].output) in found["train"].inputs
    assert found["prepare"].inputs[1].endswith("questions/train.jsonl")


def test_regenerated_answers_are_what_is_prepared(tmp_path):
    text = MINIMAL.replace("prepare: {data: [embedded:train], max_samples: 20}", "prepare: {}")
    recipe = read(write(tmp_path, text + "regenerate: {data: [embedded:train]}\n"), tmp_path / "out", ())
    prepare = stages(recipe)[1]
    assert prepare.settings["data"] == [str(tmp_path / "out" / "answers.jsonl")]
    assert str(tmp_path / "out" / "answers.jsonl") in prepare.inputs


def test_a_place_that_a_recipe_names_is_where_later_stages_look(tmp_path):
    text = MINIMAL.replace("train: {epochs: 1}", "train: {epochs: 1, save_path: here}") + "report: {}\n"
    text += "check: {}\nevaluate: {data: [embedded:test], output: there/evaluation.json}\n"
    found = {s.name: s for s in stages(read(write(tmp_path, text), tmp_path / "out", ()))}
    assert str(found["check"].output) == "here/checkpoint_best"
    assert found["report"].inputs == ("there/evaluation.json", "here")


def test_settings_given_on_the_command_line_win(tmp_path):
    changes = ("train.lr=1e-3", "prepare.max-samples=5", "name=other", "train.draft_vocab_size=64")
    recipe = read(write(tmp_path, MINIMAL), None, changes)
    found = {s.name: s for s in stages(recipe)}
    assert recipe.name == "other"
    assert found["train"].settings["lr"] == 1e-3
    assert found["train"].settings["draft_vocab_size"] == 64
    assert found["prepare"].settings["max_samples"] == 5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MINIMAL + "trian: {}\n", "unknown key `trian`; did you mean `train`"),
        (MINIMAL.replace("epochs: 1", "epoch: 1"), "stage `train`: unknown key `epoch`; did you mean `epochs`"),
        (MINIMAL.replace("epochs: 1", "epochs: none"), "stage `train`: --epochs"),
        ("name: x\nverifier: y\noutput: z\n", "no stage in it"),
        (MINIMAL.replace("extract: {}", "extract: {endpoint: server}"), "no `server:` section"),
        ("- a\n- b\n", "expected `key: value` lines"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, text, says):
    with pytest.raises(ConfigError) as refused:
        stages(read(write(tmp_path, text), None, ()))
    assert says in str(refused.value)


def test_a_change_without_a_value_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"expected stage\.key=value"):
        read(write(tmp_path, MINIMAL), None, ("train.lr",))
    with pytest.raises(ConfigError, match="`name` has no keys of its own"):
        read(write(tmp_path, MINIMAL), None, ("name.lr=3",))


def test_the_endpoint_server_becomes_the_address_of_the_recipes_server(tmp_path):
    text = MINIMAL.replace("extract: {}", "extract: {endpoint: server}") + "server: {port: 8123}\n"
    recipe = read(write(tmp_path, text), None, ("server.extra_args=[--max-model-len, 99]",))
    assert server_config(recipe).extra_args == ("--port", "8123", "--max-model-len", "99")
    extract = stages(recipe)[1]
    assert extract.uses_server
    assert extract.settings["endpoint"] == ["http://localhost:8123/v1"]


def test_a_recipe_that_is_not_there_names_the_nearest_one():
    with pytest.raises(ConfigError, match="did you mean `qwen3-8b`"):
        find("qwen3-8")
    with pytest.raises(ConfigError, match="shipped ones are"):
        find("zzz.yaml")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_recipe_fits_the_configs(path):
    recipe = read(find(path.stem), None, ())
    assert isinstance(recipe, Recipe)
    assert recipe.description
    names = [stage.name for stage in stages(recipe)]
    assert {"prepare", "extract", "train", "check", "evaluate"} <= set(names)


def test_a_change_that_is_no_yaml_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--set train\.lr=\[1: the value is not YAML") as caught:
        read(write(tmp_path, MINIMAL), None, ("train.lr=[1",))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("5: 6\n", "the key 5 is no name"), ("a: " + "[" * 5000, "nested too")])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        read(write(tmp_path, text), None, ())


def test_V03_every_file_that_a_stage_reads_is_an_input_of_it(tmp_path):
    """What changes in it makes the stage run again (`Fingerprints`)."""
    template, source = tmp_path / "t.jinja", tmp_path / "drafter"
    template.write_text("{{ messages }}")
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nverifier: embedded:verifier\noutput: {tmp_path}/out\n"
        f"regenerate: {{data: [embedded:train], chat_template: {template}}}\n"
        f"prepare: {{chat_template: {template}}}\nextract: {{}}\ntrain: {{from_pretrained: {source}}}\ncheck: {{}}\n"
        f"evaluate: {{data: [embedded:test], chat_template: {template}}}\n"
    )
    inputs = {stage.name: stage.inputs for stage in stages(read(path, None, ()))}
    verifier = str(embedded.resolve("embedded:verifier"))
    for name in ("regenerate", "prepare", "evaluate"):
        assert str(template) in inputs[name], name
    assert str(source) in inputs["train"]
    assert all(verifier in inputs[name] for name in ("regenerate", "prepare", "extract", "train", "check", "evaluate"))


def test_V03_an_edited_template_changes_the_key_of_the_stages_behind_it(tmp_path):
    template = tmp_path / "t.jinja"
    path = tmp_path / "r.yaml"
    path.write_text(
        f"name: r\nverifier: embedded:verifier\noutput: {tmp_path}/out\n"
        f"prepare: {{data: [embedded:train], chat_template: {template}}}\n"
    )

    def key() -> str:
        return decide(stages(read(path, None, ()))[0], (), {}, Fingerprints(tmp_path / "out")).key

    template.write_text("one")
    before = key()
    assert key() == before
    template.write_text("two")
    assert key() != before
