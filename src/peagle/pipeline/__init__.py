"""The whole road in one go: the demo, recipes, and the doctor who walks it on a few rows first.

In: a recipe, or nothing. Out: prepared rows, states, a drafter, its evaluation and report, each made by the same
function as its own command. A stage is done again only if what it reads has changed.
"""
