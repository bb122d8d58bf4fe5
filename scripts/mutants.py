"""Break the code on purpose, once for each priority-1 bug report, and see that the tests bearing its id notice.

    .venv/bin/python scripts/mutants.py            # all ids; or name some: R01 X12

Works in a temporary copy of the repository. Its tests must pass as it stands; then each mutation, the fault that the
report describes, is applied alone. KILLED: a test failed, as it should. SURVIVED: all passed, so they prove nothing.
INVALID: the tests could not be run. Exit status 1 unless every mutation was killed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("src", "tests", "benchmarks", "pyproject.toml")

# id -> (file below src/peagle, text that stands there exactly once, what it becomes)
MUTATIONS = {
    "D01": (
        "data/formats.py",
        'if last is not None and last["role"] == role and role != "tool" and "tool_calls" not in last:',
        'assert not (last is not None and last["role"] == role)\n        if False:',
    ),
    "D03": ("data/formats.py", 'message["tool_calls"] = [tool_call(call, repairs) for call in calls]', "pass"),
    "M01": (
        "layout/supervision.py",
        "return [p for p in range(1, len(loss_mask)) if written[p] and written[p + 1]]",
        "return [p for p in range(1, len(loss_mask)) if written[p]]",
    ),
    "M03": (
        "data/tokenize.py",
        "start = bounds.at(len(reply.prompt))",
        'start = bounds.at(len(reply.prompt)) if "im_start" in reply.prompt else None',
    ),
    "M04": (
        "data/tokenize.py",
        "mask[start:end] = [1] * (end - start) if tagged is None",
        "mask[start:end] = [0] * (end - start) if tagged is None",
    ),
    "M09": (
        "data/tokenize.py",
        "if all(reply.is_rendered and last.text.startswith(reply.text) for reply in replies):",
        "if True:",
    ),
    "M13": (
        "data/template.py",
        "text, add_special_tokens=False, return_attention_mask",
        "text, add_special_tokens=True, return_attention_mask",
    ),
    "M14": ("data/tokenize.py", "supervised = sum(row.loss_mask)", "return row"),
    "M16": (
        "data/tokenize.py",
        'raise UnusableRow(NO_SPAN, f"0 of {len(mask)} tokens supervised")',
        "return row",
    ),
    "T01": (
        "verifier/special_tokens.py",
        'MaskToken(int(shared), f"{name} token", warning)',
        'MaskToken(int(shared), f"{name} token", None)',
    ),
    "V01": (
        "data/draft_vocab.py",
        "chosen = torch.sort(rank, descending=True, stable=True).indices[:size]",
        "chosen = torch.nonzero(rank).flatten()[:size]",
    ),
    "V04": ("train/start.py", "drafter.d2t.copy_(draft_ids - torch.arange(draft_ids.numel()))", "pass"),
    "V05": (
        "data/draft_vocab.py",
        "return DraftVocab(ordered, ordered - torch.arange(len(ordered)), t2d)",
        "return DraftVocab(ordered, ordered, t2d)",
    ),
    "N09": (
        "config.py",
        "if isinstance(value, SecretStr):\n            return None",
        "if False:\n            return None",
    ),
    "X03": ("serve/tensor_rules.py", 'if "lm_head.weight" not in raw.tensors:', "if False:"),
    "X06": ("serve/verifier_rules.py", 'elif "train_lm_head" in settings:', "elif False:"),
    "X08": (
        "evaluate/results.py",
        "works = self.pooled.num_accepted > 0 or 0 < drafts < _MANY_PASSES",
        "works = drafts > 0",
    ),
    "V06": (
        "drafter/checkpoint.py",
        'fault = vocabulary_fault(tensors["d2t"], tensors["t2d"], drafter.config.vocab_size)',
        "fault = None",
    ),
    "N01": ("train/batches.py", "conversation_of.get(row_id) or row_id for row_id", "row_id for row_id"),
    "D13": ("data/readers.py", 'ids["conversation"] = named', "pass"),
    "R18": ("train/checkpoints.py", "then.get(name) != now and not", "False and not"),
    "V03": (
        "pipeline/recipe.py",
        '"prepare": ({**model, **answers}, ("model", "data", "chat_template")),',
        '"prepare": ({**model, **answers}, ("model", "data")),',
    ),
    "D09": ("data/tokenize.py", "template.prove(row, indices[-1] + 1)", "pass"),
    "N05": ("data/tokenize.py", "template.prove(row, indices[-1] + 1)", "pass"),
    "N04": ("data/template.py", "if shown == [False, True]:", "if False:"),
    "E08": (
        "evaluate/counts.py",
        "return self.num_drafts * self.num_speculative_tokens if self.drafted is None else self.drafted",
        "return self.num_drafts * self.num_speculative_tokens",
    ),
    "X13": ("evaluate/counts.py", "if here < _STEEPEST_FALL * before:", "if False:"),
    "H01": ("vllm/states.py", "if states.shape[0] != len(sent):", "if False:"),
    "H02": (
        "verifier/local.py",
        "states.update(zip(group, passed))",
        "states.update(zip(sorted(group), passed))",
    ),
    "H04": ("vllm/states.py", "while not path.exists():", "while False:"),
    "H06": ("hidden_states/proof.py", "if broken.any():", "if False:"),
    "H07": ("hidden_states/proof.py", "answer.fault or row_fault(answer, row, self._spec) or", "answer.fault or"),
    "N02": ("hidden_states/proof.py", "if len(ties):", "if False:"),
    "H15": ("hidden_states/proof.py", "own = self._again(ids, answer.origin)", "return"),
    "H17": (
        "vllm/states.py",
        "if (wrong := served.fault(connector)) is not None:",
        "if (wrong := None) is not None:",
    ),
    "H03": (
        "train/sources.py",
        "self._proof.fault(states, row)) is not None",
        "self._proof.fault(states, row) if self._proof.num_rows == 0 else None) is not None",
    ),
    "F07": ("verifier/local.py", "if error > _CAUSAL_TOLERANCE[self.dtype]:", "if False:"),
    "N06": (
        "verifier/model_config.py",
        '_LOGITS_SCALING_MULTIPLIES = ("hyperclovax",)',
        "_LOGITS_SCALING_MULTIPLIES = ()",
    ),
    "H09": ("hidden_states/writer.py", "if not isinstance(error, DiskError):", "if error is None:"),
    "H13": ("verifier/model_config.py", "if not 0 <= i <= num_layers]", "if not 0 <= i < num_layers]"),
    "H16": (
        "verifier/local.py",
        "last = captured[last_id][r, : len(row)]",
        "last = output.last_hidden_state[r, : len(row)]",
    ),
    "F01": ("verifier/weights.py", 'role = "embedding" if verifier.tied else "head"', 'role = "head"'),
    "F09": (
        "verifier/weights.py",
        "return weight if verifier.embedding_scale == 1.0 else weight.to(torch.float32) * verifier.embedding_scale",
        "return weight",
    ),
    "F10": (
        "verifier/model_config.py",
        '"rope_theta": float(own.get("rope_theta") or 10000.0)',
        '"rope_theta": 10000.0',
    ),
    "F13": (
        "verifier/model_config.py",
        'head_dim = read.maybe("head_dim") or hidden_size // num_heads',
        "head_dim = hidden_size // num_heads",
    ),
    "R01": ("train/loop.py", "if num_supervised == 0:", "if False:"),
    "R04": ("train/loop.py", "if num_supervised == 0:", "if sum(map(sum, by_depth)) == 0:"),
    "R13": (
        "drafter/network.py",
        "return normed if self.config.norm_output else carried",
        "return carried if self.config.norm_output else normed",
    ),
    "R14": ("train/blocks.py", "rope_pos=batch.rope_pos[anchor] + depth", "rope_pos=batch.rope_pos[anchor]"),
    "R20": ("train/flex.py", "return max(2 * BLOCK, -(-length // BLOCK) * BLOCK)", "return length"),
    "R21": ("kernels/triton_loss.py", "tl.where(best > z_best, first", "tl.where(best >= z_best, first"),
    "K01": ("train/masters.py", "if isinstance(like, DTensor):", "if False:"),
    "K07": ("hidden_states/extract.py", "if missing and needed + _SPARE_BYTES > free:", "if False:"),
    "X01": ("drafter/model_config.py", "if len(self.aux_layer_ids) != NUM_AUX_LAYERS_OF_VLLM:", "if False:"),
    "X02": ("serve/verifier_rules.py", "if cosine < _UNRELATED_COSINE:", "if False:"),
    "X12": ("serve/launch.py", 'settings["parallel_drafting"] = True', "pass"),
    "X15": ("serve/config_rules.py", 'if not isinstance(self.config.get("norm_before_residual"), bool):', "if False:"),
    "E01": (
        "evaluate/counts.py",
        '"pooled": figures(pooled),',
        '"pooled": {**figures(pooled), **average},',
    ),
    "E03": (
        "evaluate/counts.py",
        "return 1 + self.num_accepted / self.num_drafts if self.num_drafts else None",
        "return 1 + self.num_accepted / self.num_drafts",
    ),
    "E05": (
        "evaluate/counts.py",
        "shares.append(accepted / most if most == least and most else None)",
        "shares.append(accepted / self.num_drafts)",
    ),
}


def priority_1() -> list[str]:
    """The ids that the page gives priority 1."""
    page = (ROOT / "docs" / "bug-reports.md").read_text(encoding="utf-8")
    return re.findall(r"^\| ([A-Z]\d{2}) \| 1 \|", page, re.MULTILINE)


def test_files(ids: list[str]) -> list[str]:
    """Test files that hold a test of one of `ids`."""
    bears = re.compile(rf"def test_(?:\w+_)?(?:{'|'.join(ids)})_")
    return [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if bears.search(path.read_text(encoding="utf-8"))
    ]


def run_tests(copy: Path, ids: list[str]) -> tuple[int, str]:
    """pytest's exit status (0 passed, 1 failed, otherwise not run) for the tests of `ids`, and what it ends with."""
    wanted = " or ".join(f"test_{i} or _{i}_" for i in ids)
    command = [sys.executable, "-m", "pytest", "-x", "--tb=line", "-p", "no:cacheprovider"]
    command += ["-m", "not vllm and not gpu", "-k", wanted, *test_files(ids)]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or lines or ["no output"])[-1][:150]


def environment(copy: Path) -> dict[str, str]:
    """One thread; the copy's package, and no compiled file of an earlier mutation."""
    changes = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **changes}


def mutant(copy: Path, report: str) -> bool:
    """Break the copy, run the report's tests and restore it; whether the tests noticed."""
    name, old, new = MUTATIONS[report]
    path = copy / "src" / "peagle" / name
    whole = path.read_text(encoding="utf-8")
    if whole.count(old) != 1:
        sys.exit(f"{report}: expected once in {name}, found {whole.count(old)} times: {old}")
    path.write_text(whole.replace(old, new), encoding="utf-8")
    status, last = run_tests(copy, [report])
    path.write_text(whole, encoding="utf-8")
    print(f"{report} {('SURVIVED', 'KILLED')[status] if status in (0, 1) else 'INVALID'}: {last}", flush=True)
    return status == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ids", nargs="*", help="ids of reports; none means all")
    ids = parser.parse_args().ids or list(MUTATIONS)
    if missing := (set(priority_1()) | set(ids)) - set(MUTATIONS):
        sys.exit(f"no mutation for {', '.join(sorted(missing))}")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        where = [sys.executable, "-c", "import peagle; print(peagle.__file__)"]
        found = subprocess.check_output(where, cwd=copy, env=environment(copy), text=True).strip()
        if not Path(found).is_relative_to(copy):
            sys.exit(f"the tests would import {found}, not the copy in {copy}")
        status, last = run_tests(copy, ids)
        if status:
            sys.exit(f"the tests do not pass on the code as it stands: {last}")
        killed = [mutant(copy, report) for report in ids]
    print(f"{sum(killed)} of {len(killed)} mutations killed")
    return int(not all(killed))


if __name__ == "__main__":
    sys.exit(main())
