"""The whole pipeline in one go: recipes, the demo, and the doctor, which tries it on a few rows first.

In: a recipe, or nothing. Out: prepared rows, states, a drafter, its evaluation and report, each by its own command.
Always: a stage is done again only if its settings, what it reads or what it made have changed.
Public: `run.run`, `demo.demo`, `doctor.doctor`, `recipe.read`, `recipe.stages`.
"""
