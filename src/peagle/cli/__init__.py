"""The command line: a table of subcommands, flags made from configs, and the one place where errors become one line."""
