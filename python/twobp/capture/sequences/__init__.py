"""Programs for slices of sequences: where the positions lie in each value, and how a program runs over a part of them
(docs/long_sequences.md)."""
