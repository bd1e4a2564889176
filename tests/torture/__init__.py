"""The worst day: crashes at every operation, lost and damaged bytes, hostile files, lost ranks, full and slow disks.

`pytest tests/torture -m quick` tries a sample of each; `pytest tests/torture --full` all that is tried at all. Both end
with a table of what was tried and what came of it; `docs/reliability.md` has that of a full run.
"""
