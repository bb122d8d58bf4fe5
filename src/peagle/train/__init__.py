"""From batches to checkpoints: targets, loss, the two-pass step, optimizer, loop, resume, ranks.

In: prepared rows, their states, the verifier's head and embedding. Out: checkpoint folders that vLLM serves as they
are, `metrics.jsonl`, `run.yaml`, `manifest.json`. Always: the loss divides by the one count of supervised slots of the
whole optimizer step, over packs and ranks; N ranks give what one gives; a resumed run equals an uninterrupted one.
Public: `run.train`, `loop.fit`, `config.FitConfig` and `TrainConfig`, `sources.MemoryRows`, `parallel.World`.
"""
