"""The sample ledger: a record of the samples that each worker trains, and the proof that each sample came once."""
