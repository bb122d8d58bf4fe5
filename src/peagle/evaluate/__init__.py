"""How good a drafter is: acceptance and speed, by decoding, by replay of recorded answers, or from vLLM's counters.

In: a checkpoint, its verifier, prompts (or prepared rows with stored states, or an endpoint). Out: `evaluation.json`,
the field's table, Markdown. Always: all sources fill the same `PassCounts`, figures pool all passes, and where nothing
was drafted a figure is absent, not 0. Public: `config.EvaluateConfig`, `run.evaluate`, `counts`.
"""
