"""The verifier's own answers: a drafter learns to predict ITS verifier.

In: conversations or prompts. Out: a file of conversations for `peagle prepare`. Always: one line per answer, whole
after any kill; a resumed job writes what an uninterrupted one would have.
Public: `run.regenerate`, `config.RegenerateConfig`, `answers.EngineAnswers`.
"""
