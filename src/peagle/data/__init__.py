"""Conversations to token rows.

In: data files, folders and hub sets in any common layout, and the verifier's tokenizer. Out: `TokenRow`s: token ids and
which of them the assistant wrote. Always: ids are what a chat server would send; every row that was read is kept or
listed with its reason; order and content do not depend on the number of workers.

`peagle.data.draft_vocab` (the pruned draft vocabulary) and `peagle.data.prepare` (the stage) are imported by name.
"""

from peagle.data.config import InspectConfig, PrepareConfig
from peagle.data.prepared import Prepared, load_prepared
from peagle.data.readers import read_conversations, read_rows
from peagle.data.records import Conversation, ReadyRow, Rejected, TextRow, TokenRow, UnusableRow
from peagle.data.template import ChatTemplate, render_prompt

__all__ = [
    "ChatTemplate",
    "Conversation",
    "InspectConfig",
    "PrepareConfig",
    "Prepared",
    "ReadyRow",
    "Rejected",
    "TextRow",
    "TokenRow",
    "UnusableRow",
    "load_prepared",
    "read_conversations",
    "read_rows",
    "render_prompt",
]
