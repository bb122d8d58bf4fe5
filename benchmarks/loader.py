"""How fast the data thread makes packs from a hidden-state store, on one core: `python benchmarks/loader.py [--json]`.

A store of a verifier of hidden size 4,096 (three auxiliary layers and the last one, bfloat16, 32 kB a token) is written
to a temporary folder and lies in the page cache. Packs of 8,192 tokens are then made as training makes them: rows read,
proved, trimmed and packed, COD sampled, the step planned. In the first epoch every row's checksum and finiteness are
proved, later they are known. A GPU that trains a large drafter takes some 20,000 tokens/s (docs/scaling.md).

`share_of_plain_read` is the first epoch's rate over that of reading the same rows' bytes with safetensors and joining
them, in this run: what proving and planning leave of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_account import QWEN3_8B, drafter_config

HIDDEN, LAYERS, VOCAB = QWEN3_8B["hidden_size"], (2, 16, 29), QWEN3_8B["vocab_size"]
ROWS, TOKENS = 24, 1365
MASK = [int(i > 0.4 * TOKENS) for i in range(TOKENS)]


def write_store(folder: Path) -> None:
    """Rows of which the last 60 % are supervised, states random."""
    import torch

    from peagle.data.records import TokenRow
    from peagle.hidden_states.batch import StoredRow
    from peagle.hidden_states.store import StoreSpec
    from peagle.hidden_states.writer import StoreWriter
    from peagle.layout.supervision import label_positions

    spec = StoreSpec(
        verifier="random",
        verifier_fingerprint="",
        model_type="qwen3",
        num_layers=32,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        aux_layer_ids=LAYERS,
        dtype="bfloat16",
        tokenizer_sha256="",
    )
    with StoreWriter.open(folder, spec, 256 << 20) as writer:
        for index in range(ROWS):
            ids = torch.randint(0, VOCAB, (TOKENS,)).tolist()
            row = TokenRow(
                row_id=f"row-{index}",
                source="random",
                input_ids=ids,
                loss_mask=MASK,
                next_is_supervised=False,
                tail_length=0,
            )
            labels = torch.tensor(label_positions(MASK, False, 0))
            aux = torch.randn(TOKENS, len(LAYERS) * HIDDEN).bfloat16()
            writer.add(StoredRow(row, aux, labels, torch.randn(len(labels), HIDDEN).bfloat16()))
        writer.finish()


def plain_read(folder: Path) -> float:
    """Seconds to read every row's states and join them, nothing proved."""
    import torch
    from safetensors import safe_open

    began_s = time.perf_counter()
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, "pt") as handle:
            names = [name for name in handle.keys() if "states" in name]  # noqa: SIM118 (no mapping)
            for part in ("aux", "last"):
                torch.cat([handle.get_tensor(name) for name in names if name.startswith(part)])
    return time.perf_counter() - began_s


def measure() -> dict[str, Any]:
    """Tokens per second of the first epoch, and of the best of two later ones."""
    import torch

    from peagle.hidden_states.store import StoreReader
    from peagle.layout.supervision import extent
    from peagle.train.batches import lay_out, packs
    from peagle.train.config import FitConfig
    from peagle.train.parallel import World
    from peagle.train.plan import resolve
    from peagle.train.sources import StoreRows
    from peagle.train.step import keep_pages

    torch.set_num_threads(1)
    keep_pages()  # as training does
    drafter = drafter_config(QWEN3_8B, "peagle", 4, 8192)
    plan = resolve(FitConfig(total_seq_len=8192), drafter, World(0, 1, torch.device("cpu")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_store(folder)
        plain_s = min(plain_read(folder) for _ in range(2))
        reader = StoreReader.open(folder)
        rows = StoreRows(reader, dict.fromkeys(reader.row_ids, extent(MASK, False)))
        rates = []
        for epoch in range(3):
            order = packs({row_id: ext.num_tokens for row_id, ext in rows.extents().items()}, 8192, 0, epoch)
            began_s = time.perf_counter()
            made = [lay_out(rows, one, plan, epoch).num_pairs for one in order]
            rates.append(sum(made) / (time.perf_counter() - began_s))
    return {
        "first_epoch_tokens_per_s": round(rates[0]),
        "later_tokens_per_s": round(max(rates[1:])),
        "plain_read_tokens_per_s": round(ROWS * TOKENS / plain_s),
        "share_of_plain_read": round(rates[0] * plain_s / (ROWS * TOKENS), 3),
        "gb_per_s": round(rates[0] * (len(LAYERS) + 0.6) * HIDDEN * 2 / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    args = parser.parse_args()
    found = measure()
    if args.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:28} {value}")


if __name__ == "__main__":
    main()
