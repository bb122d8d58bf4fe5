"""Prepared rows and a verifier come in; a store of hidden states on disk, and packed batches read from it, go out.

What always holds: a row is in the store whole, once, with the ids and loss mask it was made from, finite, and under a
checksum, or it is not there. Public: `config.ExtractConfig`, `extract.extract`, `store.StoreReader` and `StoreSpec`,
`writer.StoreWriter`, `batch.StoredRow`, `batch.Batch` and `batch.pack`.
"""
