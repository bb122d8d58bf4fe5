"""Conversations to token rows.

In: data files, folders and hub sets in any common layout, and the verifier's tokenizer. Out: `TokenRow`s: token ids and
which of them the assistant wrote. Always: ids are what a chat server would send; every row that was read is kept or
listed with its reason; order and content do not depend on the number of workers.
Public: `prepare.prepare`, `prepared.load_prepared`, `readers.read_rows`, `records`, `template.ChatTemplate`.
"""
