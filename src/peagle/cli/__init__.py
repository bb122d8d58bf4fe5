"""The front door: one thin file per subcommand, which builds the stage's config and calls one function.

In: the command line (and `--config file.yaml`). Out: an exit status: 0 done, 1 a measurement failed its bar or an
internal error, 2 the user can mend it (one line says how), 130 interrupted. Nothing imports this room.
"""
