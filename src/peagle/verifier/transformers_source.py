"""Hidden states of token rows through Transformers, in this process: the source behind `peagle extract` by default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from peagle.data.rows import TokenRow
from peagle.verifier.source import RowStates
from peagle.verifier.transformers import TransformersVerifier, group_by_length


class TransformersSource:
    """Runs rows of like length together.

    The groups depend on the whole job, not on what is left of it, and a group of which one row is wanted runs whole: a
    resumed job gives the bits of an uninterrupted one.

    Args:
        verifier: the model.
        aux_layer_ids: see `layers.resolve_aux_layer_ids`.
        batch_size: rows of one pass.
        with_choices: give the verifier's next-token choice at every position that has a label.
    """

    def __init__(
        self, verifier: TransformersVerifier, aux_layer_ids: tuple[int, ...], batch_size: int, with_choices: bool
    ) -> None:
        self._verifier, self._aux_layer_ids = verifier, aux_layer_ids
        self._batch_size, self._with_choices = batch_size, with_choices

    @property
    def max_tokens(self) -> int:
        """The verifier's own limit."""
        return self._verifier.facts.max_position_embeddings

    def states(self, rows: Sequence[TokenRow], wanted: AbstractSet[str]) -> Iterator[RowStates]:
        """See `source.StateSource.states`; refuses no row."""
        row_ids, lengths = [], []
        for row in rows:
            row_ids.append(row.row_id)
            lengths.append(len(row.input_ids))
        for group in group_by_length(lengths, self._batch_size):
            if wanted.isdisjoint(row_ids[i] for i in group):
                continue
            members = [rows[i] for i in group]
            positions = [row.label_positions() if self._with_choices else [] for row in members]
            passed = self._verifier.run([row.input_ids for row in members], self._aux_layer_ids, positions)
            for row, states, choice_pos in zip(members, passed, positions):
                if row.row_id in wanted:
                    yield RowStates(
                        row.row_id, row.input_ids, states.aux_states, states.last_states, choice_pos, states.choice_ids
                    )

    def close(self) -> None:
        """Nothing to release."""
